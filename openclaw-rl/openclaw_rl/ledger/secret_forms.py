"""Forms of secrets and of personal data, and of the placeholders and identifiers that only look like them.

Secrets are the prefixes of issuers' keys, private key blocks, bearer headers, passwords in URLs, and values with the
name of a secret (`password: …`, `"api_key": "…"`). Personal data are e-mail addresses, phone numbers with a country or
area code, card numbers and IBANs with right check digits, and US social security numbers. No form finds a word that
happens to be a password, or the name or address of a person.

A manual, a system prompt or a tool's description holds examples: `https://user:password@example.com`,
`secret: /run/secrets/db`, `"apiKey": "sk-local-123"`. These are no secrets. A value that looks random is one, wherever
it stands.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_Check = Callable[[re.Match[str], str], bool]


def _any(found: re.Match[str], text: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    pattern: re.Pattern[str]
    """The group `x` is masked, or the whole match without such a group."""
    anchors: tuple[str, ...]
    """Lower-case strings; a text with a match contains at least one. Empty: every text is searched."""
    check: _Check = _any
    """Test of a match and of the text that would be masked; False leaves it unmasked."""


# -- what only looks like a secret -------------------------------------------------------------------------------------

_PLACEHOLDER = re.compile(
    r"(?i)example|placeholder|changeme|xxxx|your[_-]|\*\*\*|\.\.\.|redacted|<[^>]*>|\$\{|\$\(|\(\)|env"
)
_PLACEHOLDER_KEY = re.compile(r"(?i)example|placeholder|changeme|xxxx|your[_-]|redacted|abc123|123abc")
_NAME = re.compile(r"[A-Za-z_]+(?:[.:][A-Za-z_]+)*")
_PIECE = r"(?:[A-Za-z]{2,}+|\d{1,4}+)"
_PATH = re.compile(
    r"(?:~|\.{1,2}|[A-Za-z]:|\$[A-Z_]{2,20}|file:/?)?"
    rf"(?:/\.?{_PIECE}(?:[._-]?{_PIECE}){{0,8}}(?:\.d)?){{1,16}}/?"
)
"""A path of readable names from a root, a home or a drive. Base64 may begin with a slash too."""
_COUNT = re.compile(
    r"(?i)\d{1,3}(?:[_.]\d{3})+(?:[_-]?[a-z]{1,12})?"
    r"|\d{1,12}[_-]?(?:tokens?|char(?:acter)?s?|bytes|[kmg]i?b|k|m|ms|sec(?:ond)?s?|min(?:ute)?s?|hours?|days?|requests?|calls?)"
)
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_VOWEL = re.compile(r"(?i)[aeiouy]")
_LONGEST_NUMBER = 4
_ITS_OWN_NAME = re.compile(
    "password|passwd|passphrase|pass|pwd|pw|token|apikey|credentials|mypassword|yourpassword|userpassword|mysecret|mytoken"
)
"""Words that only name the place of a password."""
_WEAK = re.compile(
    f"{_ITS_OWN_NAME.pattern}|secret|key|admin|administrator|root|user|username|test|testing|tester|guest|demo|default|"
    "changeme|letmein|qwerty|example|sample|dummy|foobar|newpassword|oldpassword|supersecret|postgres|mysql|redis|"
    "rabbitmq|mongo|minio|dev|local"
)
"""Words that manuals and compose files of developers have for a password."""
_LEET = str.maketrans("013457@$", "oieastas")
_LOCAL_HOST = re.compile(
    r"(?i)(?:[a-z0-9-]+\.)*localhost|127(?:\.\d{1,3}){3}|0\.0\.0\.0|\[::1?\]|host\.docker\.internal"
)
_RESERVED_HOST = re.compile(r"(?i)(?:[a-z0-9-]+\.)*(?:example(?:\.(?:com|org|net|edu))?|test|invalid)")
"""Names that nobody can own (RFC 2606)."""


def _looks_random(text: str) -> bool:
    """Return True for a text that is neither a word, nor a placeholder, nor code."""
    kinds = sum(any(map(test, text)) for test in (str.islower, str.isupper, str.isdigit, lambda c: not c.isalnum()))
    return len(set(text)) >= 6 and kinds >= 2 and not _PLACEHOLDER.search(text)


def _is_of_words(text: str) -> bool:
    """Return True for words and short numbers, as identifiers have them: `sk-local-123`, `Passwd2Manager.default`."""
    parts = _WORDS.findall(text)
    if not parts or any(part.isdigit() and len(part) > _LONGEST_NUMBER for part in parts):
        return False
    letters = [part for part in parts if part.isalpha()]
    # Letters of a random text stand alone or in pairs, or make no syllable.
    in_words = sum(len(part) for part in letters if len(part) >= 3 and _VOWEL.search(part))
    return in_words >= 0.7 * sum(map(len, letters)) and in_words > 0


def _is_weak(text: str, words: re.Pattern[str] = _WEAK) -> bool:
    """Return True for such a word, also with a number behind it or in disguise (`Admin123`, `P@ssw0rd!`)."""
    plain = text.lower().rstrip("0123456789!?.#*_-")
    return any(map(words.fullmatch, (plain, plain.translate(_LEET), re.sub(r"[^a-z]", "", plain))))


def _looks_like_a_key(found: re.Match[str], text: str) -> bool:
    return len(set(text)) >= 6 and not _PLACEHOLDER_KEY.search(text)


def _looks_like_a_dashed_key(found: re.Match[str], text: str) -> bool:
    """Return True unless the text is a name with dashes: `sk-learn-2-0-and-what-comes-behind`."""
    return any(map(str.isdigit, text)) and not _is_of_words(text) and _looks_like_a_key(found, text)


def _looks_like_a_bearer(found: re.Match[str], text: str) -> bool:
    return _looks_random(text) and not _is_of_words(text) and not _PLACEHOLDER_KEY.search(text)


def _looks_like_a_value(found: re.Match[str], text: str) -> bool:
    """Return True for a random text that is no name in a program (`config.db.password`), no path and no count."""
    if not _looks_random(text) or _NAME.fullmatch(text) or _PATH.fullmatch(text) or _COUNT.fullmatch(text):
        return False
    if _is_weak(text):
        return False
    # A user's password may be made of words; an issuer's key is not, and no password is a name with dots.
    is_key = _KEY_NAME.search(found[0][: found.start("x") - found.start()])
    if is_key and _PLACEHOLDER_KEY.search(text):
        return False
    is_name = "." in text and text[0].isalpha() and not text[-1].isdigit() and "@" not in text
    return not ((is_key or is_name) and _is_of_words(text))


def _is_password_of_url(found: re.Match[str], text: str) -> bool:
    """Return True unless the password is a placeholder, or a word that manuals have, at a host that is nobody's."""
    user, host = found["user"], found["host"]
    if _PLACEHOLDER.search(text) or text.lower() == user.lower() or _is_weak(text, _ITS_OWN_NAME):
        return False
    if _RESERVED_HOST.fullmatch(host):
        return _looks_random(text) and not _is_weak(text)
    return not (_LOCAL_HOST.fullmatch(host) and _is_weak(text))


def _luhn(found: re.Match[str], text: str) -> bool:
    digits = [int(char) for char in text if char.isdigit()]
    if not 13 <= len(digits) <= 19 or len(set(digits)) == 1:
        return False
    doubled = [digit if i % 2 == 0 else digit * 2 - 9 * (digit > 4) for i, digit in enumerate(reversed(digits))]
    return sum(doubled) % 10 == 0


def _iban(found: re.Match[str], text: str) -> bool:
    plain = re.sub(r"\s", "", text).upper()
    if not 15 <= len(plain) <= 34:
        return False
    return int("".join(str(int(char, 36)) for char in plain[4:] + plain[:4])) % 97 == 1


def _phone(found: re.Match[str], text: str) -> bool:
    return 8 <= sum(map(str.isdigit, text)) <= 15


# -- forms ------------------------------------------------------------------------------------------------------------

_END = r"(?![A-Za-z0-9_-])"
_TOKENS: dict[str, tuple[str, ...]] = {
    # name of the mark: what issuers' keys look like, each with its fixed beginning
    "api_key": (
        r"sk-[A-Za-z0-9_-]{20,200}",
        r"(?:rk|sk|pk)_(?:live|test)_[A-Za-z0-9]{16,200}",
        r"AIza[A-Za-z0-9_-]{35}",
        r"(?:AKIA|ASIA)[A-Z0-9]{16}",
        r"hf_[A-Za-z0-9]{30,100}",
        r"gsk_[A-Za-z0-9]{40,100}",
        r"r8_[A-Za-z0-9]{30,60}",
        r"SG\.[A-Za-z0-9_-]{16,64}\.[A-Za-z0-9_-]{16,64}",
        r"dop_v1_[a-f0-9]{64}",
        r"key-[a-f0-9]{32}",
        r"npm_[A-Za-z0-9]{36}",
        r"pypi-[A-Za-z0-9_-]{50,250}",
    ),
    "token": (
        r"gh[pousr]_[A-Za-z0-9]{36,255}",
        r"github_pat_[A-Za-z0-9_]{50,255}",
        r"glpat-[A-Za-z0-9_-]{20,100}",
        r"xox[abeoprs]-[A-Za-z0-9-]{10,250}",
        r"xapp-[A-Za-z0-9-]{10,250}",
        r"eyJ[A-Za-z0-9_-]{10,4000}\.eyJ[A-Za-z0-9_-]{10,8000}\.[A-Za-z0-9_-]{10,4000}",
        r"ya29\.[A-Za-z0-9_-]{20,1000}",
    ),
}
_BEGIN = r"(?<![A-Za-z0-9_-])"
_KEY_NAME = re.compile(r"(?i)key|token|client[_-]?secret")
"""Names of values that an issuer made."""
_KEY_BLOCK = r"-----BEGIN (?:[A-Z0-9]{1,20} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
_NAMED = (
    r"(?i:(?<![a-z])(?:[a-z0-9]{0,20}[_-]){0,3}"
    r"(?:api[_-]?key|apikey|secret[_-]?key|client[_-]?secret|access[_-]?token|auth[_-]?token|refresh[_-]?token|"
    r"private[_-]?token|passwd|password|passphrase|secret)"
    r"['\"\\]{0,3}[ \t]{0,3}(?::=|=>|[:=])[ \t]{0,3}['\"\\]{0,3})"
    r"(?P<x>[^\s'\"\\,;(){}\[\]<>]{8,200}+)(?![(\[])"
)


def _kinds(patterns: dict[str, tuple[str, ...]]) -> Iterator[Kind]:
    for name, forms in patterns.items():
        for form in forms:
            for anchor in _fixed_beginnings(form):
                check = _looks_like_a_dashed_key if form.startswith("sk-") else _looks_like_a_key
                yield Kind(name, re.compile(_BEGIN + "(?:" + form + ")" + _END), (anchor,), check)


def _fixed_beginnings(form: str) -> tuple[str, ...]:
    """Return the literal beginning of a token's pattern, in lower case."""
    found = re.match(r"[A-Za-z0-9_-]+", form.replace(r"\.", ""))
    return (found[0].lower(),) if found else ("",)


SECRETS: tuple[Kind, ...] = (
    Kind(
        "private_key",
        re.compile(_KEY_BLOCK + r"(?P<x>(?:(?!-----)[\s\S]){20,20000})(?:-----END|\Z)"),
        ("private key",),
    ),
    *_kinds(_TOKENS),
    Kind(
        "bearer",
        re.compile(r"(?i:\bbearer[ \t]{1,3})(?P<x>[A-Za-z0-9._~+/=-]{16,4000})"),
        ("bearer",),
        _looks_like_a_bearer,
    ),
    Kind(
        "basic",
        re.compile(r"(?i:authorization['\"]?[ \t]?[:=][ \t]?['\"]?basic[ \t]{1,3})(?P<x>[A-Za-z0-9+/=]{8,2000})"),
        ("basic",),
    ),
    Kind(
        "password",
        re.compile(
            r"(?i:\b[a-z][a-z0-9+.-]{1,20}://)(?P<user>[^\s/:@'\"<>\[\]]{0,100}):(?P<x>[^\s/@'\"<>]{3,200})@"
            r"(?P<host>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.-]{0,253})"
        ),
        ("://",),
        _is_password_of_url,
    ),
    Kind("password", re.compile(_NAMED), ("key", "token", "passw", "passphrase", "secret"), _looks_like_a_value),
)
PERSONAL: tuple[Kind, ...] = (
    Kind(
        "email", re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![\w-])"), ("@",)
    ),
    Kind("card", re.compile(r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w-])"), (), _luhn),
    Kind("iban", re.compile(r"(?<!\w)[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?!\w)"), (), _iban),
    Kind("ssn", re.compile(r"(?<![\w-])(?!000|666|9)\d{3}-(?!00)\d{2}-(?!0000)\d{4}(?![\w-])"), ("-",)),
    Kind(
        "phone",
        re.compile(
            r"(?<![\w+.-])(?:\+\d(?:[ .()-]{0,2}\d){6,14}|\(\d{3}\) ?\d{3}[ .-]\d{4}|\d{3}[.-]\d{3}[.-]\d{4})(?![\w-])"
        ),
        (),
        _phone,
    ),
)
