"""Values that two processes must agree on: protocol version, heartbeats, sizes of messages."""

# The version of worker.proto. A worker refuses a scheduler of another version. Version 2 added
# checksums and heartbeats, version 3 workers that schedulers share, version 4 workers that pool,
# version 5 blocks that sequences free behind a window.
PROTOCOL_VERSION = 5

# Both ends of an internal stream send at least one message in this time.
HEARTBEAT_SECONDS = 1.0
# A peer that has sent nothing for this many heartbeats counts as lost.
SILENT_HEARTBEATS = 5

# The largest message on any connection.
MAX_MESSAGE_BYTES = 64 << 20
# The largest message that a client may send to a scheduler. A prompt of 4 Mi characters, the
# default of --max-prompt-chars, takes at most 16 MiB.
MAX_CLIENT_MESSAGE_BYTES = 32 << 20
