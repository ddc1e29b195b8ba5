"""The web page at `/`: its files in `assets/`, and the engine's state that it shows.

The page calls the public API as any client does. This package does not answer API requests.
"""
