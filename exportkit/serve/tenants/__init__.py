"""What each API key may do: how often, how much, with which models."""
