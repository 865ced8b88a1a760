"""Counts the RPCs a server answers, by method and outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from paceline.transport.trust.handlers import Behaviour, Context, Request, Response, rewrap


class RpcMeter(grpc.aio.ServerInterceptor):
    """The first interceptor of a server: what others refuse counts too."""

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        """By method (Service/Method). Only methods that exist count, so a peer can't make up names."""
        self.failed: Counter[str] = Counter()
        """Refused, cancelled or broken."""
        self.open: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Request, Response] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Request, Response] | None:
        method = handler_call_details.method.rpartition(".")[2]
        return rewrap(await continuation(handler_call_details), lambda behaviour: self._counted(behaviour, method))

    def _counted(self, behaviour: Behaviour, method: str) -> Behaviour:
        async def counted(request: Any, context: Context) -> Any:
            self.open[method] += 1
            try:
                answer = await behaviour(request, context)
            except BaseException:
                self.failed[method] += 1
                raise
            finally:
                self.open[method] -= 1
            self.answered[method] += 1
            return answer

        return counted
