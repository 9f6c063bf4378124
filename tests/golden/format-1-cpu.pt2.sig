{
 "format_version": 1,
 "manifest_sha256": "2186616691acf6addb8a2f8d8c935a229559f1d2c65e7cf8bfec9a116b599277",
 "file_sha256": "3b68939f6beaf45e05ec7e8db370d4db47ce70afe5f52744947c851a10521789",
 "signatures": [
  {
   "key_id": "5a7de8d8b9dcacde7004520e1ed2166afd708d978af8c7571ca946e0f08be889",
   "algorithm": "ed25519",
   "signature": "ncebgrf4Ak3nGdZt4xngkIE93p4Gritk/ZEoF2evpMKWWpc5kj7M4pq7luAXdLnHNhHwUBo0yO1R/JydiThxDw=="
  }
 ]
}
