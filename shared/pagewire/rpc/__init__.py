"""gRPC between processes: channels, servers, targets, credentials, checksums, API keys."""

import os

# gRPC writes lines in its own format to standard error. It reads this variable when it is imported,
# which the modules of this room do next.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Services fork only to run another program at once. gRPC's handlers can deadlock in such a child,
# which then never runs it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
