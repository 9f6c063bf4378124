{
 "format_version": 1,
 "manifest_sha256": "d2dd339b29518b6885bab17be22391599e9dc7e9ab7fbc3b078eafb92521a61f",
 "file_sha256": "f72650d942e886d9fb9666bcd4976cde2245e53f9ce9f9b230ef0247afe92279",
 "signatures": [
  {
   "key_id": "6d076100a384a028bf63141f5e5e11d75a63f3bd41592f659f068ca68da1e330",
   "algorithm": "ed25519",
   "signature": "agwAb4lNr/h0SOxtSxuL/THZy92Bj1MCXqajZxfW2czRpRZoV668UKUOgKdOM91j1cjINEVVwZZZBEBqi0k+CA=="
  }
 ]
}
