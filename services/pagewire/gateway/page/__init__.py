"""The web page at `/`: its files in `assets/`, and what it shows of the engine.

It calls the public API as any client does. How requests are answered is no matter of this room.
"""
