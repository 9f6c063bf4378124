{
 "format_version": 1,
 "manifest_sha256": "a3e3f89ac4224ac54060e627f5871e0da1c6c8c7e22f18e1460e6eb0f2febac6",
 "file_sha256": "0496716c49e82ad5d45184fc17417c8a6b6fff0af321a48f57b3cef4b8c1ef12",
 "signatures": [
  {
   "key_id": "a70e496ce2db3105a44241e74c109dd0dd98346edf2c8b1806a7c3dd32e362ce",
   "algorithm": "ed25519",
   "signature": "AbQMsTKrQUJ3moe0jUhPYpLK00jTp7lXnqnJKO6kAVFWDz/RCFz8DGUulsCBHyJX9XCduVF3wJ03Nk9Zd/8iAA=="
  }
 ]
}
