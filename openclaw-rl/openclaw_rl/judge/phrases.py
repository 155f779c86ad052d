"""Table of the rules judge: phrases by which users rate a reply, and error messages of tools.

One phrase a line, as a small regular expression; `{it}` and its like stand for the words in `_WORDS`. Text is matched
case-folded, with single spaces, without code and quotations, at word boundaries (scripts without spaces: anywhere).
With `max_words` a phrase counts in a short message ("shorter please") and not inside a new request ("find me a shorter
way to work, I am always late"). Languages: English, and the commonest words of German, French,
Spanish, Italian, Portuguese, Russian, Chinese, Japanese and Korean.
"""

import re
from dataclasses import dataclass

_WORDS = {
    "it": "it|this|that|them|these|those|the (?:answer|reply|text|response|output|result|summary|list|code)",
    "that_is": "(?:that|this|it)(?:'s| is| was)(?: just| simply| completely| still)?",
    "is_not": "(?:that|this|it)(?:'s not| is not| isn't| wasn't| was not)",
    "size": "long|short|verbose|wordy|brief|vague|formal|casual|complicated|complex|technical|detailed|generic|much",
    "than": "shorter|longer|simpler|briefer|clearer|softer|warmer|friendlier|(?:more|less) {quality}",
    "quality": "concise|brief|casual|formal|detail(?:ed)?|specific|polite|friendly|technical|verbose|natural|direct",
    "format": "lists?|bullets?|bullet points?|numbering|markdown|bold|headings?|headers?|emojis?|tables?|jargon",
    "do": "use|add|write|give|include|say|make|repeat|send|put|do (?:that|this|it)",
    "doing": "using|adding|writing|giving|including|saying|making|repeating|sending|putting|doing (?:that|this|it)",
    "few": r"one|two|three|a single|a few|fewer|\d+",
    "good": "great|perfect|awesome|excellent|amazing|brilliant|fantastic|wonderful|lovely|nice|cool|good|beautiful"
    "|helpful|exactly|correct|right|better|well done",
}


@dataclass(frozen=True, slots=True)
class TextRule:
    name: str
    value: int
    pattern: re.Pattern[str]
    max_words: int | None = None


def _phrases(table: str) -> re.Pattern[str]:
    lines = [
        re.sub(r"\{([a-z_]+)\}", lambda m: f"(?:{_WORDS[m[1]]})", line.strip()) for line in table.strip().splitlines()
    ]
    return re.compile(r"(?<!\w)(?:" + "|".join(lines) + r")(?!\w)")


def _characters(*phrases: str) -> re.Pattern[str]:
    return re.compile("|".join(phrases))


_DECLINES = _phrases(
    """
    ^(?:no|nope|nah),? (?:thanks|thank you|thx|problem|worries|need)
    ^(?:no|nope|nah),? that's (?:all|it|fine|perfect|great|good)
    """
)
_CORRECTS = _phrases(
    r"""
    {that_is} (?:wrong|incorrect|false|a mistake)
    {is_not} (?:right|correct|true|quite right|working|what i .*)
    {that_is} (?:far |way |much |rather |a bit |a little )?too {size}
    ^(?:far |way |much |rather |a bit |a little )?too {size}
    i (?:don't|do not) (?:like|want|need) (?:the |your |any |so many |these |those )?(?:numbered |long )?{format}
    not what i (?:asked|wanted|meant|said|need|needed|was)
    you(?:'re| are) (?:wrong|mistaken|not listening)
    you (?:forgot|missed|ignored|misread|misunderstood|skipped|broke|didn't|did not|got it wrong|keep)
    i (?:meant|told you|already (?:said|told|asked)|didn't (?:ask|mean|want|say))
    (?:as|but|no,?|like) i (?:said|asked)
    i asked (?:for|you|how|what|about)
    i (?:wanted|need|needed|asked for) .* not
    (?:it|that|this) (?:doesn't|does not|didn't|did not|won't) (?:work|help|compile|run|answer|make sense|exist)
    (?:doesn't|didn't|does not) work
    ^(?:wrong|incorrect|false|useless|terrible|awful|nonsense|rubbish|bad)
    wrong (?:answer|file|one|number|date|name|person|language|format|place)
    (?:useless|terrible|awful|horrible|nonsense|disappointing|annoying)[.!]?$
    (?:redo|rewrite|rephrase|reword|shorten|simplify|undo|revert) {it}
    (?:try|do it|do that|once) (?:again|over|more)
    start over
    one more time
    (?:don't|do not|never) {do}
    (?:don't|do not) be (?:so|too) (?!hard|sorry|sure|modest|shy|kind)\w+
    stop {doing}
    (?:no|without|skip the|drop the|lose the|not a|not in|don't want(?: an?)?) (?:numbered |long )?{format}
    why (?:did|do|would|are|didn't|don't) you
    still (?:not|wrong|too|fails?|failing|broken|doesn't|does not|isn't|getting|using|the same)
    """
)
_ASKS_FOR_A_CHANGE = _phrases(
    r"""
    {than}
    (?:too|so|way too) {size}
    (?:make|keep|write|put|turn|phrase) {it} (?:more|less|in|into|as|a bit|{than})
    (?:fix|change|correct|adjust|improve|repeat|translate) {it}
    instead
    (?:use|with) (?:fewer|less|simpler|plain|short) \w+
    i(?:'d| would) (?:prefer|rather)
    ^(?:please |now |but |just )*(?:answer |say it |reply )?(?:in|with|using|only) (?:{few}|plain|short|simple|english)
    ^(?:just |only )?{few} (?:or \w+ )?(?:short )?(?:sentences?|lines?|words?|paragraphs?)
    again(?:,? please)?[.!]?$
    """
)
_CORRECTS_ELSEWHERE = _phrases(
    r"""
    (?:ist|war|das ist) (?:falsch|verkehrt)
    ^falsch
    stimmt (?:so )?nicht
    nicht das, was ich
    ich (?:meinte|sagte)
    (?:kürzer|einfacher)(?: bitte)?
    zu (?:lang|kurz|kompliziert|förmlich)
    noch ?mal(?: bitte)?[.!]?$
    (?:ohne|keine) (?:listen?|aufzählung(?:en)?|emojis?)
    stattdessen
    funktioniert nicht
    c'est faux
    pas ce que (?:je|j').*
    je (?:voulais|veux) dire
    (?:plus court|trop long|trop court|plus simple)
    (?:refais|recommence|reformule|encore une fois)
    sans (?:listes?|puces|emojis?)
    ne marche pas
    (?:está|es|estuvo) mal
    incorrecto
    no es lo que
    (?:quise|quería) decir
    (?:más corto|más breve|más simple|demasiado largo)
    (?:otra vez|hazlo de nuevo)[.!]?$
    sin (?:listas?|viñetas|emojis?)
    no funciona
    (?:è |é )?sbagliato
    non è quello che
    intendevo
    (?:più corto|più breve|troppo lungo)
    non funziona
    (?:está )?errado
    não (?:é|era) (?:isso|o que)
    quis dizer
    (?:mais curto|muito longo)
    não funciona
    (?:неправильно|неверно|не то|короче|переделай|не работает)
    я имел[а]? в виду
    слишком (?:длинно|длинный|коротко)
    """
)
_THANKS = _phrases(
    """
    thanks?|thank you|thx|ty|cheers
    appreciate it|much appreciated
    danke(?:schön)?|merci|gracias|grazie|obrigad[oa]|спасибо
    """
)
_PRAISES = _phrases(
    """
    ^(?:oh |wow,? |{that_is} |very |so |really |yes,? |ok,? |looks |sounds |much )*{good}
    (?:love|like) (?:it|this|that)
    (?:it|that|this) (?:works|worked|helps|helped)
    exactly what i .*
    (?:good|great|nice) (?:job|work|answer|idea)
    ^(?:super|perfekt|prima|genau|toll|klasse|passt|sehr gut)
    ^(?:parfait|génial|exactement|très bien)
    ^(?:perfecto|genial|excelente|exacto|muy bien)
    ^(?:perfetto|ottimo|perfeito|ótimo|отлично|супер|хорошо)
    """
)
_SAYS_NO = _phrases("^(?:no+|nope|nah|nein|non|não|нет|wait|hold on|hmm+,? no)")
_DOES_NOT_FOLLOW = _phrases(
    r"""
    ^(?:what|huh|eh|pardon|sorry)\?+.*
    (?:what|how) do you mean
    i (?:don't|do not|didn't) (?:understand|get (?:it|that))
    makes no sense
    """
)

TEXT_RULES: tuple[TextRule, ...] = (
    TextRule("declines politely", 1, _DECLINES, max_words=12),
    TextRule("correction", -1, _CORRECTS),
    TextRule("change request", -1, _ASKS_FOR_A_CHANGE, max_words=12),
    TextRule("correction", -1, _CORRECTS_ELSEWHERE, max_words=25),
    TextRule(
        "correction",
        -1,
        _characters(
            "不对|错了|不是这个|不是我要|我的意思是|重新|再来一次|太长|太短|短一点|简短|简单一点|改一下|不要用|没有用",
            "違う|違います|間違|もっと短|長すぎ|短すぎ|やり直|もう一度|使わないで|틀렸|아니야|더 짧게|너무 길",
        ),
    ),
    TextRule("thanks", 1, _THANKS),
    TextRule("thanks", 1, _characters("谢谢|多谢|感谢|ありがとう|感謝|감사|고마워")),
    TextRule("praise", 1, _PRAISES),
    TextRule("praise", 1, _characters("很好|太好了|太棒|完美|不错|正是|いいね|完璧|すごい|素晴らし|완벽|좋아")),
    TextRule("no", -1, _SAYS_NO, max_words=25),
    TextRule("no", -1, _characters("^不是|^不，|^不,|^いいえ"), max_words=25),
    TextRule("does not follow", -1, _DOES_NOT_FOLLOW, max_words=15),
)
"""The first that matches decides, so that a correction beats praise and praise beats a bare "no"."""

_IGNORING_CASE = re.IGNORECASE | re.MULTILINE
_EXIT = r"\b(?:exit(?:ed)?(?: with)?[ _]?(?:code|status)|returncode|exitcode)[\"']?\s*[:=]?\s*\(?"

TOOL_RULES: tuple[tuple[str, int, re.Pattern[str]], ...] = (
    ("exit code", -1, re.compile(_EXIT + r"-?(?!0\b)\d+", _IGNORING_CASE)),
    ("exit code 0", 1, re.compile(_EXIT + r"0\b", _IGNORING_CASE)),
    ("traceback", -1, re.compile(r"^Traceback \(most recent call last\):|^panic: |^Unhandled ", re.MULTILINE)),
    ("error field", -1, re.compile(r'"errors?"\s*:(?!\s*(?:null\b|false\b|""|\[\s*\]|\{\s*\}|0\b))', _IGNORING_CASE)),
    ("failure field", -1, re.compile(r'"is_?error"\s*:\s*true|"(?:ok|success)"\s*:\s*false', _IGNORING_CASE)),
    ("failure status", -1, re.compile(r'"status"\s*:\s*"(?:error|failed|failure|timeout)"', _IGNORING_CASE)),
    (
        "error message",
        -1,
        re.compile(
            r"^\W{0,3}(?:\w+: )?(?:fatal|error|failed|\w*(?:error|exception))\b\s*(?::|\[|$)"
            r"|(?:^|: )(?:command not found|no such file or directory|permission denied|access denied|timed out)\b"
            r"|\bERR!|\bsegmentation fault\b|\bcommand (?:timed out|aborted|failed)\b",
            _IGNORING_CASE,
        ),
    ),
)
"""Name, value, pattern. The first pattern that matches a result decides; a result without a match is a success."""
