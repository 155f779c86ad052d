"""Secrets and personal data are found by their form, ordinary text is not touched, and time is linear."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.ledger.redaction import PERSONAL, SECRETS, Redactor

SECRET, BOTH = Redactor(secrets=True, pii=False), Redactor(secrets=True, pii=True)
KEY_BLOCK = (
    "-----BEGIN OPENSSH PRIVATE KEY-----\n" + "b3BlbnNzaC1rZXktdjEAAAA\n" * 4 + "-----END OPENSSH PRIVATE KEY-----"
)


@pytest.mark.parametrize(
    ("text", "secret", "kind"),
    [
        ("use sk-proj-Ab12Cd34Ef56Gh78Ij90Kl12", "sk-proj-Ab12Cd34Ef56Gh78Ij90Kl12", "api_key"),
        ("sk-ant-api03-" + "aB3_" * 20, "sk-ant-api03-" + "aB3_" * 20, "api_key"),
        ("export AWS_ACCESS_KEY_ID=AKIAQWERTYUIOPASDFGH", "AKIAQWERTYUIOPASDFGH", "api_key"),
        ("key=AIzaSyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q", "AIzaSyA1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q", "api_key"),
        ("hf_" + "aB1cD2eF3g" * 4, "hf_" + "aB1cD2eF3g" * 4, "api_key"),
        ("git clone https://ghp_" + "a1B2" * 9 + "@github.com/x", "ghp_" + "a1B2" * 9, "token"),
        ("xoxb-1234567890-abcdefghij", "xoxb-1234567890-abcdefghij", "token"),
        (
            "a eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2QT4 b",
            "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2QT4",
            "token",
        ),
        ("Authorization: Bearer a1B2c3D4e5F6g7H8i9", "a1B2c3D4e5F6g7H8i9", "bearer"),
        ("-H 'authorization: basic dXNlcjpwYXNzd29yZA=='", "dXNlcjpwYXNzd29yZA==", "basic"),
        ("postgres://bob:hunter22@db.local/app", "hunter22", "password"),
        ("https://:t0psecret@host/", "t0psecret", "password"),
        ("DB_PASSWORD=Tr0ub4dor&3", "Tr0ub4dor&3", "password"),
        ('{"client_secret": "q8Zk2mWx71Lp"}', "q8Zk2mWx71Lp", "password"),
        ('{\\"password\\": \\"q8Zk2mWx71Lp\\"}', "q8Zk2mWx71Lp", "password"),
        ("api-key: Zx9kLm2Qp0vb", "Zx9kLm2Qp0vb", "password"),
        (KEY_BLOCK, "b3BlbnNzaC1rZXktdjEAAAA", "private_key"),
        (KEY_BLOCK.replace("\n", "\\n"), "b3BlbnNzaC1rZXktdjEAAAA", "private_key"),
        (KEY_BLOCK[:120], "b3BlbnNzaC1rZXktdjEAAAA", "private_key"),  # cut in the middle
    ],
)
def test_a_secret_is_found_and_what_stands_around_it_stays(text, secret, kind):
    masked = SECRET.mask(f"before {text} after")
    assert secret not in masked
    assert f"[redacted:{kind}]" in masked
    assert masked.startswith("before ")
    assert masked.endswith("after") or text == KEY_BLOCK[:120]
    assert SECRET.mask(masked) is masked


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("ann.smith+news@mail.example.org", "email"),
        ("4111 1111 1111 1111", "card"),
        ("5500-0000-0000-0004", "card"),
        ("DE89 3704 0044 0532 0130 00", "iban"),
        ("GB82WEST12345698765432", "iban"),
        ("+49 170 1234567", "phone"),
        ("(415) 555-2671", "phone"),
        ("415-555-2671", "phone"),
        ("123-45-6789", "ssn"),
    ],
)
def test_personal_data_is_masked_only_when_asked(text, kind):
    assert SECRET.mask(f"it is {text}, yes") == f"it is {text}, yes"
    assert BOTH.mask(f"it is {text}, yes") == f"it is [redacted:{kind}], yes"


@pytest.mark.parametrize(
    "text",
    [
        "my password is in the safe, the secret of the key is patience",
        "password: your_password_here",
        "API_KEY=<your key> TOKEN=${TOKEN} SECRET=$(pass show x)",
        'api_key = os.environ["OPENAI_API_KEY"]',
        "client = OpenAI(api_key=settings.judge.api_key.get_secret_value())",
        "password: str | None = None, self.password = config.db.password_of_user",
        "token_count: 12345678, max_tokens=4096, secret: a long sentence",
        "scikit: sk-learn-is-a-long-name-with-dashes, task-force-and-other-things",
        "Bearer of bad news, bearer understanding",
        "https://example.org/a:b@c is no login, nor is http://host:8080/x@y",
        "commit 3f2a9c1d8e7b6a5f4c3d2e1f0a9b8c7d6e5f4a3b, uuid 123e4567-e89b-12d3-a456-426614174000",
        "2026-11-28 09:02:16, version 3.11.12, 1234567890123456, 192.168.100.200, 10.000.000,00 EUR",
        "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE\n-----END PUBLIC KEY-----",
        "chatcmpl-0123456789abcdef0123456789abcdef lease-12-ab34cd56",
    ],
)
def test_ordinary_text_is_not_touched(text):
    assert BOTH.mask(text) is text


@pytest.mark.parametrize(
    "text",
    [
        # addresses of manuals, compose files and templates
        "Clone private repos as https://user:password@example.com/repo.git",
        "git clone https://USERNAME:TOKEN@github.com/org/repo.git",
        "postgres://postgres:postgres@localhost:5432/app and mysql://root:secret@127.0.0.1/db",
        "DATABASE_URL=postgresql+asyncpg://admin:admin@db:5432/app",
        "amqp://guest:guest@rabbit:5672//, redis://:password@[::1]:6379/0",
        "https://someone:sunshine@mirror.example.org/, http://a:b4t@svc.test:8080, https://u:opensesame@x.invalid/",
        "mongodb://test:test123@host.docker.internal:27017/?authSource=admin",
        # paths
        "secret: /run/secrets/db_password2",
        "secret=~/.config/app/token1.txt, password_file: x, passwd: ./conf.d/pw2.ini",
        "client_secret: D:/keys/deploy2.pem",
        "access_token = $HOME/.cache/app/token.v2",
        # keys of local servers, and of nobody
        'Config: "apiKey": "sk-local-123"',
        "OPENAI_API_KEY=sk-no-key-required, api_key: lm-studio-1, API_KEY='EMPTY_123'",
        "AKIAIOSFODNN7EXAMPLE and sk-your-key-here-1234567890 and sk-abc123def456ghi789jkl",
        "ghp_" + "x" * 36,
        "Authorization: Bearer not-needed-for-local-use-1",
        # names of programs and libraries, counts
        "Read sk-learn-2-0-and-what-comes-behind-it first.",
        "passwd=Passwd2Manager.default",
        "password = Settings2.Database.Password",
        "max_access_token: 128_000_tokens, refresh_token: 3600_seconds, access_token: 1.000.000",
        # passwords of manuals
        "Username: admin, Password: Admin123",
        "password: P@ssw0rd! or passwd=changeme_2024 or secret: my-secret-1",
        # an example value in the description of a tool
        '{"name": "login", "parameters": {"properties": {"api_key": {"description": "as api_key=sk-test-key-1"}}}}',
    ],
)
def test_an_example_a_path_or_an_identifier_is_no_secret(text):
    assert SECRET.mask(text) is text


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Push to https://deploy:fAk3-n0t-r34l-Pw7@git.corp.invalid/x.git", "fAk3-n0t-r34l-Pw7"),
        ("https://deploy:fAk3-n0t-r34l-Pw7@example.com/x.git", "fAk3-n0t-r34l-Pw7"),
        ("postgres://app:sunshine@localhost/app", "sunshine"),  # a word, and not one that manuals have
        ("mysql://root:secret@db.corp.io/app", "secret"),
        ("redis://:hunter22@127.0.0.1:6379", "hunter22"),
        ("secret: /9j/4AAQSkZJRgABAQ", "/9j/4AAQSkZJRgABAQ"),  # base64, not a path
        ("password: correct-horse-battery", "correct-horse-battery"),
        ("password: Summer2024", "Summer2024"),
        ("password: 2024summer!", "2024summer!"),
        ("api_key: ab12-cd34-ef56-gh78", "ab12-cd34-ef56-gh78"),
        ("apiKey: prod-Xk29ZqLw", "prod-Xk29ZqLw"),
        ("sk-1234567890qwertzuiop-1234", "sk-1234567890qwertzuiop-1234"),
        ("passwd=Qz7.kW2x.pL9v", "Qz7.kW2x.pL9v"),
        ("Authorization: Bearer mF_9.B5f-4.1JqM-xx7", "mF_9.B5f-4.1JqM-xx7"),
    ],
)
def test_a_secret_of_a_real_ones_form_is_masked_beside_examples(text, secret):
    masked = SECRET.mask(f"As in https://user:password@example.com: {text} ")
    assert secret not in masked
    assert "https://user:password@example.com" in masked


def test_switched_off_it_finds_nothing():
    off = Redactor(secrets=False, pii=False)
    assert not off.is_on
    assert off.mask(KEY_BLOCK) is KEY_BLOCK


@given(st.text(alphabet=st.sampled_from("aZ09 -_.:/@+\"'\\=\n{}"), max_size=200), st.integers(0, 200))
def test_a_key_is_found_in_any_text_between_blanks(text, at):
    key = "ghp_" + "x9Y8" * 9
    masked = BOTH.mask(f"{text[:at]} {key} {text[at:]}")
    assert key not in masked
    assert BOTH.mask(masked) == masked


PARTS = [
    "a",
    "0",
    "a_",
    "sk-",
    "eyJ",
    "eyJaaaaaaaaaaa.",
    "password=",
    "api_key",
    "api_",
    "://",
    "x://a:",
    "bearer ",
    "-----BEGIN PRIVATE KEY-----",
]
PARTS += [
    "@",
    "a@",
    "a@a.",
    "+1",
    "+1 ",
    "1-",
    "1 ",
    "AB12",
    "AB12 ",
    "AB12CDEF",
    "(123) ",
    "secret-",
    "key: '",
    "\\\\",
    "--",
]


@pytest.mark.parametrize("part", PARTS)
def test_time_is_linear_for_every_pattern(part):
    def least(n: int) -> float:
        text, times = part * n, []
        for _ in range(2):
            began = time.thread_time()
            for kind in (*SECRETS, *PERSONAL):
                kind.pattern.search(text)
            times.append(time.thread_time() - began)
        return max(min(times), 2e-4)

    size = 4000 // len(part) + 100
    assert least(8 * size) / least(size) < 24  # 8 when linear, 64 when quadratic
