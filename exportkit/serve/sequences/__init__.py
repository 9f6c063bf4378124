"""Which step of which sequence may run. Knows neither HTTP nor torch, nor the rest of exportkit."""
