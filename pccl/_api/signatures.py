"""Makes the methods of both communicators from one signature.

A function of ``arguments`` takes the arguments of a call, checks them, and returns its request.
``asking`` makes the awaitable method from that function and from a method that takes the request.
``blocking`` makes the blocking method from the awaitable one. ``help()``, editors and type checkers
show the arguments of the function and the docstring of the method.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import signature
from typing import Any, Concatenate, ParamSpec, TypeVar

from pccl.errors import PCCLError

_P = ParamSpec("_P")
_Request = TypeVar("_Request")
_Self = TypeVar("_Self")
_T = TypeVar("_T")


def asking(
    request_of: Callable[_P, _Request],
) -> Callable[
    [Callable[[_Self, _Request], Coroutine[Any, Any, _T]]],
    Callable[Concatenate[_Self, _P], Coroutine[object, object, _T]],
]:
    """Make a method that takes a request into one that takes the arguments of ``request_of``.

    The coroutine yields ``object``, because mypy infers Any for a ``gather`` of ``Any`` coroutines.
    """

    def make(
        method: Callable[[_Self, _Request], Coroutine[Any, Any, _T]],
    ) -> Callable[Concatenate[_Self, _P], Coroutine[object, object, _T]]:
        @wraps(method)
        async def call(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return await method(self, request_of(*args, **kwargs))
            except PCCLError as error:  # without the frames of the library
                failure = error.with_traceback(None)
            try:
                raise failure from failure.__cause__
            finally:
                del failure  # its traceback keeps this frame, and so the arguments

        asked, own = signature(request_of), signature(method)
        me, _ = own.parameters.values()
        call.__signature__ = asked.replace(  # type: ignore[attr-defined]
            parameters=[me, *asked.parameters.values()], return_annotation=own.return_annotation
        )
        return call

    return make


def blocking(
    method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[Any, _P], _T]:
    """Make the blocking method from the awaitable one.

    The method runs the same coroutine. Only ``_run`` waits in it, and the ``_run`` of a blocking
    communicator blocks the thread.
    """

    @wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        coroutine = method(self, *args, **kwargs)
        try:
            coroutine.send(None)
        except StopIteration as returned:
            value: _T = returned.value
            return value
        except PCCLError as error:  # without the frames of the library
            failure = error.with_traceback(None)
        else:
            raise AssertionError(f"{method.__qualname__} suspended outside of _run")
        finally:
            coroutine.close()
        try:
            raise failure from failure.__cause__
        finally:
            del failure  # its traceback keeps this frame, and so the arguments

    return call
