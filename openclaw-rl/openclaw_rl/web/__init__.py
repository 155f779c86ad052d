"""HTTP helpers without a subject: request bodies, server-sent events, keys, host checks, errors."""
