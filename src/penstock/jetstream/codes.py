"""Maps the server's error numbers to our errors, and keeps the server's text."""

from __future__ import annotations

from collections.abc import Mapping

from penstock import errors

DISABLED = frozenset({10035, 10039, 10076})
"""No such account, JetStream not enabled for the account, JetStream not enabled at all."""
DELETE_FAILED = 10057
"""Deleting a message failed, for any reason, also because it does not exist."""
SUBJECTS_OVERLAP = 10065
"""A stream captures what another one captures already; the server does not say which."""

WRITE_UNDER_WAY = 10164
"""A wrong last sequence on a replicated stream: another write may not have reached the replicas yet."""
WRONG_LAST_SEQUENCE = frozenset({10071, WRITE_UNDER_WAY})
"""The last sequence of stream or subject is not the one that a publish expects: another publisher was first."""

BUSY = {
    10004,  # incomplete results: some servers of the cluster did not answer
    10005,  # no suitable peers for placement, as while a cluster forms
    10008,  # JetStream system temporarily unavailable
    10009,  # this server cannot handle the request: it does not lead
    10023,  # insufficient resources
    10028,  # insufficient memory
    10041,  # the replication group could not agree
    10047,  # insufficient storage
    10077,  # the message could not be stored
    10118,  # stream is offline
    10119,  # consumer is offline
    10124,  # stream is being moved
    10158,  # the same message id is being stored right now
    10163,  # last sequence of the subject is not known yet
    10167,  # too many requests
    10202,  # a change of cluster members is under way
    10210,  # too many atomic batches in flight
    10211,  # too many fast batches in flight
    10226,  # a reconfiguration of the stream is under way
}
INVALID = {
    10006,  # needs a cluster: JetStream is not clustered
    10010,  # needs a cluster
    10012,  # consumer create or update failed, as for a field that cannot be changed
    10029,  # mirror could not be set up
    10036,  # not supported in a cluster
    10045,  # source could not be set up
    10049,  # stream create failed
    10052,  # stream configuration is invalid
    10053,  # stream limits
    10069,  # stream update failed
    10074,  # replicas need a cluster
    10096,  # stream is not valid
    10185,  # the request needs a newer API level
}
"""Error numbers whose HTTP-like class (500, 503, 412) would be misleading."""

BY_ERR_CODE: Mapping[int, type[errors.ApiError]] = {
    **dict.fromkeys(BUSY, errors.ServerBusy),
    **dict.fromkeys(INVALID, errors.InvalidConfiguration),
    10013: errors.AlreadyExists,  # consumer name already in use
    10014: errors.ConsumerNotFound,
    10037: errors.MessageNotFound,
    10043: errors.MessageNotFound,  # sequence not found
    10058: errors.AlreadyExists,  # stream name already in use with a different configuration
    10059: errors.StreamNotFound,
    10105: errors.AlreadyExists,  # consumer already exists and is still active
    10130: errors.AlreadyExists,  # stream name already in use, cannot restore
    10148: errors.AlreadyExists,  # consumer already exists (action: create)
    10149: errors.ConsumerNotFound,  # consumer does not exist (action: update)
}
"""Exact server error numbers; anything else falls back to the HTTP-like class below."""

BY_CODE: Mapping[int, type[errors.ApiError]] = {
    400: errors.InvalidConfiguration,
    404: errors.NotFound,
    429: errors.ServerBusy,
    503: errors.ServerBusy,
}


def api_error(what: str, raw: Mapping[str, object]) -> errors.ApiError:
    """Return the error for the `error` object of an answer; `what` describes the request and its resource."""
    code, err_code = int(str(raw.get("code", 0))), int(str(raw.get("err_code", 0)))
    kind = BY_ERR_CODE.get(err_code) or BY_CODE.get(code, errors.ApiError)
    return kind(what, code, err_code, str(raw.get("description", "no description")))


def refusal(what: str, raw: Mapping[str, object]) -> errors.PenstockError:
    """`api_error` for a request to the JetStream API, which may also be refused because JetStream is not enabled."""
    error = api_error(what, raw)
    if error.err_code in DISABLED:
        return errors.JetStreamDisabled(f"this server for this account ({error.description}; asked: {what})")
    return error
