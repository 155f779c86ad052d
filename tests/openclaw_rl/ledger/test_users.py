"""Numbers of each user: tokens and requests since a time, what waits, wishes."""

from openclaw_rl.ledger.users import UserUse
from openclaw_rl.types import SideCount


async def test_the_tokens_of_a_users_day(ledger, driver):
    """Prompt and reply of turns and side requests, of that user alone; a request that failed costs nothing."""
    for user in ("ann", "bob", "ann"):
        await driver.served(user=user, prompt=(1, 2, 3))  # 3 + 4 tokens, at 1001, 1002 and 1003
    for user in ("ann", "bob"):
        await ledger.count_side(SideCount(user, None, "other", 10, 5, 200, at=1003.0))
    assert await ledger.tokens_since("ann", 0.0) == 7 + 7 + 15
    assert await ledger.tokens_since("ann", 1002.5) == 7 + 15
    assert await ledger.tokens_since("ann", 1003.5) == 0
    assert await ledger.tokens_since("nobody", 0.0) == 0


async def test_the_figures_of_every_user(ledger, driver):
    await driver.served(user="ann", prompt=(1, 2, 3))
    await driver.served(user="bob", prompt=(1,))
    await driver.judged()  # ann's
    await ledger.count_side(SideCount("cat", None, "other", 10, 5, 200, at=1003.0))
    found = await ledger.users(1001.5)
    assert found["bob"] == UserUse(1, 5, 1002.0, {"served": 1})
    assert found["cat"] == UserUse(1, 15, 1003.0)
    assert (found["ann"].requests, found["ann"].waiting) == (1, {"served": 1, "judged": 1})
    assert await ledger.users(5000.0) == {
        "ann": UserUse(waiting={"judged": 1, "served": 1}),
        "bob": UserUse(waiting={"served": 1}),
    }
