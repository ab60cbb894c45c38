"""Views: results of the other parts as text for a terminal and as HTML. Reads results only."""
