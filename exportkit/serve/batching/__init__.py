"""Chooses which requests run together and when. Knows neither HTTP nor torch, nor the rest of exportkit."""
