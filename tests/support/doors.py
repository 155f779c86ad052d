"""Every route of the server, by the kind of key that opens it."""

ADMIN = [
    ("GET", "/v1/admin/status"),
    ("GET", "/v1/admin/history"),
    ("GET", "/v1/admin/policies"),
    ("GET", "/v1/admin/engines"),
    ("POST", "/v1/admin/engines/1"),
    ("GET", "/v1/admin/users"),
    ("GET", "/v1/admin/users/ann/wishes"),
    ("GET", "/v1/admin/versions/0"),
    ("POST", "/v1/admin/rollback"),
    ("POST", "/v1/admin/pin"),
    ("POST", "/v1/admin/learning"),
    ("POST", "/v1/admin/train"),
    ("POST", "/v1/admin/forget"),
    ("POST", "/v1/admin/compare"),
    ("GET", "/openapi.json"),
    ("GET", "/metrics"),
]
TRAINER = [
    ("POST", f"/v1/trainer/{name}")
    for name in (
        *("tip", "lease", "renew", "release", "commit", "durable", "failed"),
        *("start", "leased", "push/begin", "push/end"),
    )
]
CHAT = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/chat/completions"),
    *(
        ("POST", f"{prefix}/{name}")
        for prefix in ("/v1", "")
        for name in ("responses", "messages", "messages/count_tokens")
    ),
    ("POST", "/v1/feedback"),
    ("GET", "/v1/wishes"),
    ("GET", "/v1/wishes/1"),
    ("POST", "/v1/wishes/1"),
    ("DELETE", "/v1/wishes/1"),
    ("GET", "/v1/policy"),
    ("POST", "/v1/policy/rollback"),
    ("POST", "/v1/policy/pin"),
    ("POST", "/v1/policy/learning"),
    ("GET", "/v1/outcomes"),
    ("POST", "/v1/episodes"),
    ("POST", "/v1/episodes/e/outcome"),
    ("POST", "/v1/episodes/e/abort"),
    ("POST", "/v1/episodes/e/v1/chat/completions"),
    ("POST", "/v1/episodes/e/v1/responses"),
]
READERS = [
    ("GET", "/v1/turns"),
    ("GET", "/v1/turns/chatcmpl-1"),
    ("GET", "/v1/turns/chatcmpl-1/state"),
    ("GET", "/v1/turns/chatcmpl-1/tokens"),
    ("POST", "/v1/turns/chatcmpl-1"),
    ("GET", "/v1/episodes"),
    ("GET", "/v1/episodes/e"),
]
"""The admin key reads every turn, a chat key those of its user."""
OPEN = {("GET", "/healthz")} | {
    ("GET", f"{path}{name}") for path in ("/v1/models", "/models") for name in ("", "/{name}")
}
"""They tell a word, a version's number, a model's name and its length."""
