"""`/v1/wishes`: what a user asked for in words, and what has become of it.

A chat key reaches the wishes of its own user alone; any other wish does not exist for it. Removing a wish stops its
rehearsal. It takes back no weights: that is what `forget --rebuild` does with the turns that asked for it.
"""

from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from openclaw_rl.errors import LedgerError, LedgerUnavailable, RequestError
from openclaw_rl.server.api.status import plain
from openclaw_rl.types import Wish
from openclaw_rl.web.auth import Keys


class WishChange(BaseModel):
    """Change of one wish; at least one field."""

    model_config = ConfigDict(extra="forbid")

    general: bool | None = None
    """True: the wish holds for every prompt. False: where it was asked."""
    practise: bool | None = Field(default=None)
    """True: practise it again, if it was removed, stopped or rests. False: remove it."""


class WishLedger(Protocol):
    """Methods of the ledger that these routes use."""

    async def wishes(self, *, user: str | None = None, only_active: bool = False) -> list[Wish]: ...

    async def remove_wish(self, wish_id: int, *, user: str | None = None) -> Wish: ...

    async def set_wish_general(self, wish_id: int, is_general: bool, *, user: str | None = None) -> Wish: ...

    async def practise_wish(self, wish_id: int, *, user: str | None = None) -> Wish: ...


def build_wishes_router(ledger: WishLedger, keys: Keys, *, aim: float) -> APIRouter:
    """aim: the learned share at which a wish is learned."""
    router = APIRouter()

    def owner(request: Request) -> str:
        return keys.caller(request.headers.get("authorization")).user

    Owner = Annotated[str, Depends(owner)]

    async def own(wish_id: int, user: str) -> Wish:
        found = next((wish for wish in await ledger.wishes(user=user) if wish.wish_id == wish_id), None)
        if found is None:
            raise RequestError(f"you have no wish {wish_id}", status=404, code="wish_not_found")
        return found

    @router.get("/v1/wishes")
    async def wishes(user: Owner) -> JSONResponse:
        """Return the wishes of the key's user, oldest first."""
        return JSONResponse({"wishes": [row(wish, aim) for wish in await ledger.wishes(user=user)]})

    @router.get("/v1/wishes/{wish_id}")
    async def wish(user: Owner, wish_id: int) -> JSONResponse:
        return JSONResponse(row(await own(wish_id, user), aim))

    @router.post("/v1/wishes/{wish_id}")
    async def change(user: Owner, wish_id: int, body: WishChange) -> JSONResponse:
        """Say where a wish holds, practise it again, or remove it."""
        found = await own(wish_id, user)
        if body.general is None and body.practise is None:
            raise RequestError("say something: `general` or `practise`", param="general")
        try:
            if body.general is not None:
                found = await ledger.set_wish_general(wish_id, body.general, user=user)
            if body.practise is not None:
                call = ledger.practise_wish if body.practise else ledger.remove_wish
                found = await call(wish_id, user=user)
        except LedgerUnavailable:
            raise
        except LedgerError as error:
            raise RequestError(str(error), status=409, code="wish_over") from error
        return JSONResponse(row(found, aim))

    @router.delete("/v1/wishes/{wish_id}")
    async def remove(user: Owner, wish_id: int) -> JSONResponse:
        """Remove a wish: no practice rehearses it any more."""
        await own(wish_id, user)
        return JSONResponse(row(await ledger.remove_wish(wish_id, user=user), aim))

    return router


def row(wish: Wish, aim: float) -> dict[str, Any]:
    """Return a wish in the JSON form that its user gets. `learned` is the learned share as a part of the aim.

    A source that `is_held_back` is not practised: its prompt measures what was learned.
    """
    share = wish.learned_share
    learned = None if share is None else min(max(share / aim, 0.0), 1.0)
    fields: dict[str, Any] = plain(wish)
    back = {source.turn_id for source in wish.held_back}
    fields["sources"] = [one | {"is_held_back": one["turn_id"] in back} for one in fields["sources"]]
    return fields | {"text": wish.text, "learned": learned, "aim": aim}
