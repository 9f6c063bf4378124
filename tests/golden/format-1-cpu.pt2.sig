{
 "format_version": 1,
 "manifest_sha256": "ee93d4fa01f18657f14550472835ac14960584bb6f6b9ac2fb8953db46201511",
 "file_sha256": "86c24ac31663135108882adcb1ce480082b7e9fb59b78e23dc1242d1c14ffd6d",
 "signatures": [
  {
   "key_id": "dfcd4d0d6e592deaeb3e49f62517c00bcc8004ab37ee613b10600c0a71b94e3c",
   "algorithm": "ed25519",
   "signature": "jSynEYJ/leVULe3Dci1kdW9NgG+nhd/WawiM6Hv4Q8ysneaAj50OG3pRIzcbjQgaCozrGcYLKPpBjq14WT/HCQ=="
  }
 ]
}
