"""gRPC between Pagewire's processes: channels, servers, credentials, checksums, API keys."""

import os

# gRPC writes lines of its own form to standard error. It reads this when it is imported, which the
# modules of this room do next.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
