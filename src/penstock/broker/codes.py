"""The server's error numbers, mapped to our errors in one place, with the server's words kept."""

from __future__ import annotations

from penstock import errors

BY_ERR_CODE: dict[int, type[errors.ApiError]] = {
    10005: errors.ServerBusy,  # no suitable peers for placement (while a cluster forms)
    10008: errors.ServerBusy,  # JetStream system temporarily unavailable
    10009: errors.ServerBusy,  # cluster has no leader for this asset yet
    10012: errors.AlreadyExists,  # consumer create request for another configuration
    10013: errors.AlreadyExists,  # consumer name already in use
    10014: errors.ConsumerNotFound,
    10023: errors.ServerBusy,  # insufficient resources
    10024: errors.InvalidConfiguration,  # interest retention in a mirror
    10037: errors.MessageNotFound,
    10047: errors.ServerBusy,  # insufficient storage resources
    10052: errors.InvalidConfiguration,  # stream configuration
    10058: errors.AlreadyExists,  # stream name already in use with a different configuration
    10059: errors.StreamNotFound,
    10065: errors.InvalidConfiguration,  # subjects overlap with an existing stream
    10074: errors.InvalidConfiguration,  # replicas need a cluster
    10105: errors.AlreadyExists,  # consumer already exists and is still active
    10148: errors.AlreadyExists,  # consumer already exists
    10149: errors.ConsumerNotFound,  # consumer does not exist (action: update)
    10210: errors.ServerBusy,  # too many batches in flight
}
"""Exact server error numbers; anything else falls back to the HTTP-like class below."""

BY_CODE: dict[int, type[errors.ApiError]] = {
    400: errors.InvalidConfiguration,
    404: errors.NotFound,
    429: errors.ServerBusy,
    500: errors.InvalidConfiguration,
    503: errors.ServerBusy,
}


def api_error(what: str, raw: dict[str, object]) -> errors.ApiError:
    """The error for the `error` object of an API answer; `what` says what was asked, of which resource."""
    code, err_code = int(str(raw.get("code", 0))), int(str(raw.get("err_code", 0)))
    description = str(raw.get("description", "no description"))
    kind = BY_ERR_CODE.get(err_code) or BY_CODE.get(code, errors.ApiError)
    return kind(what, code, err_code, description)
