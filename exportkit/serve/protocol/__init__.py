"""Messages of the Open Inference Protocol, version 2. Knows neither torch nor a server."""
