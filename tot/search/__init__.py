"""Search algorithms over trees of thoughts."""
