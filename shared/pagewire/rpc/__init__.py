"""gRPC between Pagewire's processes: channels, servers, credentials, checksums, API keys."""
