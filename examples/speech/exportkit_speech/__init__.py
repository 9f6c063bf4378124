"""A streaming detector of speech: the model, a listener to recordings, and a part of the server's page that listens."""
