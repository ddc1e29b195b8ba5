"""Bounds of a request that several services must agree on."""

MAX_REQUEST_ID_LENGTH = 256
# Of a client's id in HTTP headers or gRPC metadata, which becomes a part of the request_id.
MAX_GIVEN_ID_LENGTH = 128
# Of a chat template that comes with a request.
MAX_CHAT_TEMPLATE_BYTES = 64 << 10
# Of cache salts and tenants.
MAX_NAME_LENGTH = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 8
# Stop tokens of a request and the model's own end-of-sequence tokens together.
MAX_STOP_IDS = 16
# Tokens whose logits a request may shift.
MAX_BIASES = 300
# Likeliest tokens whose log probabilities are returned for each token.
MAX_LOGPROBS = 20
# Outputs of one prompt, including candidates that are not returned.
MAX_CHOICES = 16
# Tokens that a request may restrict its output to, and words that it may ban.
MAX_ALLOWED_TOKENS = 16_384
MAX_BAD_WORDS = 64
MAX_BAD_WORD_LENGTH = 128
# Of a schema, a grammar or another text that constrains an output. It is sent with the prompt.
MAX_GRAMMAR_BYTES = 64 << 10
INT32_MAX = 2**31 - 1
