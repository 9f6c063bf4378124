{
 "format_version": 1,
 "manifest_sha256": "e30fdbb4c05b6fda2eb864618e8868e679e2c6bbb46f8598a71b318f232122d3",
 "file_sha256": "e7f134a10f3a44191afec56cecbac4cfb6460f29ebec5c24ee619ad4572b8dac",
 "signatures": [
  {
   "key_id": "dccb9748f6c24819b0183d80541c984a0c6dac28aae6142b3f8543c023d5f783",
   "algorithm": "ed25519",
   "signature": "M3wb/6XCtgOO8Vq1CtL+HPfXsVXfubs3aHoEAckTyE4su1KWxsMTfFmL5ondfe1iZHYfXI7gJ6dIbMlC+xMkAA=="
  }
 ]
}
