{
 "format_version": 1,
 "manifest_sha256": "4c13392b775b6992ec2696283b9f9b15f66dea7477b7bf6edac239126a008004",
 "file_sha256": "b29b45910475821a816f80a8c38f234183a556968488621beefc0e3e15fe4266",
 "signatures": [
  {
   "key_id": "0f77a68b8dc8f6fdd5d7347d7bbe3d8017d87f4693d97685fdf965c9ad3feba0",
   "algorithm": "ed25519",
   "signature": "4S09CBG6+U/sKeaDo325vKMklLykj4W9Sl8KoYOZgC7tXHmtDSpCRLfYaHnT8PR+rjzcHIspmQTVbp5Y0+8NDg=="
  }
 ]
}
