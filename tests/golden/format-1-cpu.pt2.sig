{
 "format_version": 1,
 "manifest_sha256": "4a87dac4a0850973373ac83946775bf352612e2db39715685f67435f3fba36ef",
 "file_sha256": "2f738365fdbcd5797a1e8ccd4cafe7fb9871f215120cedce4064723622dd8a19",
 "signatures": [
  {
   "key_id": "dc051ab4aacd0bb3d9fce0d5e9ebe2b3302b84538202801bfb6d24f47f24c3c5",
   "algorithm": "ed25519",
   "signature": "VaX2XMg3BV69yef4HVBaJQIw8/DMghsoDL8uz1pTaLlVZgOKaxLwSlttfQTgjd418KZ6ObPQ6XrflO49SNCLAw=="
  }
 ]
}
