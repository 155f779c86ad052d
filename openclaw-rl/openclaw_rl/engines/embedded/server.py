"""HTTP server of the embedded engine: the dialect's routes over adapters (loop) and scheduler (model thread).

A request holds its adapter and its job as long as its connection lives: the engine aborts the job of a client that
disconnects.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from openclaw_rl.engines.dialect import (
    Abort,
    GenerateRequest,
    LoadAdapter,
    ModelCard,
    ModelInfo,
    ModelList,
    Pause,
    UnloadAdapter,
    UpdateWeights,
    error_body,
)
from openclaw_rl.engines.embedded.adapters import Adapters
from openclaw_rl.engines.embedded.jobs import Job
from openclaw_rl.engines.embedded.runner import Adapter, Runner
from openclaw_rl.engines.embedded.scheduler import Scheduler
from openclaw_rl.engines.embedded.wire import Generation, Limits, check, make_job, progress, reply
from openclaw_rl.errors import EngineGone, EngineRefused
from openclaw_rl.processes.malloc import give_back


class Service:
    """Operations behind the routes; one object per process."""

    def __init__(self, scheduler: Scheduler, runner: Runner, limits: Limits, info: ModelInfo) -> None:
        self._scheduler, self._limits, self._info = scheduler, limits, info
        self._adapters = Adapters(runner.load_adapter, self._drop)

    @property
    def info(self) -> ModelInfo:
        return self._info

    async def generate(self, body: GenerateRequest) -> Response:
        check(body, self._limits)
        adapter = self._adapters.hold(body.lora_path)
        job = make_job(body, adapter, self._limits)
        self._scheduler.post(lambda: self._scheduler.submit(job))
        return Generation(
            self._events(job) if body.stream else self._whole(job), is_stream=body.stream, end=lambda: self._end(job)
        )

    async def _events(self, job: Job) -> AsyncIterator[bytes]:
        async for begin, end, _ in progress(job):
            yield b"data: " + reply(job, begin, end, weight_version=self._version) + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def _whole(self, job: Job) -> AsyncIterator[bytes]:
        async for _ in progress(job):
            pass
        text = self._limits.decode(job.output) if self._limits.decode else ""
        yield reply(job, 0, job.visible, weight_version=self._version, text=text)

    async def _end(self, job: Job) -> None:
        """Abort the job if it is unfinished, and release its adapter."""
        if job.finish is None:
            with contextlib.suppress(EngineGone):  # the process is ending, and its jobs with it
                await self._scheduler.call(lambda: self._scheduler.abort(job, "the client went away"))
        if job.adapter is not None:
            self._adapters.release(job.adapter)

    @property
    def _version(self) -> str:
        return self._info.weight_version or "default"

    async def pause(self, body: Pause) -> Response:
        await self._scheduler.call(lambda: self._scheduler.pause(body.mode))
        return JSONResponse({"status": "ok"})

    async def resume(self) -> Response:
        await self._scheduler.call(self._scheduler.resume)
        return JSONResponse({"status": "ok"})

    async def abort(self, body: Abort) -> Response:
        rid = None if body.abort_all else body.rid
        await self._scheduler.call(lambda: self._scheduler.abort_rid(rid, "aborted"))
        return JSONResponse({"status": "ok"})

    async def flush(self) -> Response:
        if not await self._scheduler.call(self._scheduler.flush):
            raise EngineRefused("requests are running or queued: the cache was not flushed", status=400)
        await asyncio.to_thread(give_back)
        return Response("Cache flushed.\n", media_type="text/plain")

    def models(self) -> ModelList:
        base = ModelCard(id="base")
        adapters = self._adapters.folders.items()
        return ModelList(
            data=[base, *(ModelCard(id=name, root=str(folder), parent=base.id) for name, folder in adapters)]
        )

    async def load_adapter(self, body: LoadAdapter) -> Response:
        await self._adapters.load(body.lora_name, Path(body.lora_path))
        return JSONResponse({"success": True, "loaded_adapters": self._adapters.names})

    async def unload_adapter(self, body: UnloadAdapter) -> Response:
        await self._adapters.unload(body.lora_name)
        return JSONResponse({"success": True, "loaded_adapters": self._adapters.names})

    async def _drop(self, adapter: Adapter) -> None:
        await self._scheduler.call(lambda: self._scheduler.drop_adapter(adapter))
        await asyncio.to_thread(give_back)

    async def update_weights(self, body: UpdateWeights) -> Response:
        await self._scheduler.call(lambda: self._scheduler.load_weights(Path(body.model_path)))
        self._info = self._info.model_copy(
            update={
                "model_path": body.model_path,
                "weight_version": body.weight_version or self._version,
                "base_hash": None,
            }
        )
        return JSONResponse({"success": True, "message": "weights updated"})


def build_app(service: Service) -> FastAPI:
    app = FastAPI(title="OpenClaw-RL embedded engine", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(EngineRefused)
    async def refused(_: Request, error: EngineRefused) -> Response:
        return JSONResponse(error_body(error.message), status_code=error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return JSONResponse(error_body(f"{where}: {first['msg']}" if where else first["msg"]), status_code=400)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200)

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> ModelInfo:
        return service.info

    @app.get("/v1/models")
    async def models() -> ModelList:
        return service.models()

    @app.post("/generate")
    async def generate(body: GenerateRequest) -> Response:
        return await service.generate(body)

    @app.post("/pause_generation")
    async def pause(body: Pause) -> Response:
        return await service.pause(body)

    @app.post("/continue_generation")
    async def resume() -> Response:
        return await service.resume()

    @app.post("/abort_request")
    async def abort(body: Abort) -> Response:
        return await service.abort(body)

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush() -> Response:
        return await service.flush()

    @app.post("/load_lora_adapter")
    async def load_adapter(body: LoadAdapter) -> Response:
        return await service.load_adapter(body)

    @app.post("/unload_lora_adapter")
    async def unload_adapter(body: UnloadAdapter) -> Response:
        return await service.unload_adapter(body)

    @app.post("/update_weights_from_disk")
    async def update_weights(body: UpdateWeights) -> Response:
        return await service.update_weights(body)

    return app
