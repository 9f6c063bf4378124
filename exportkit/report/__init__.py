"""`exportkit inspect --report`: one page about an artifact. Imports no torch, and believes nothing an artifact says."""
