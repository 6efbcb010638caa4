"""Decisions that are broken on purpose, and the tests that must notice: read by `scripts/mutations`.

Each mutation replaces a text that occurs exactly once in its file. Choose decisions whose failure costs a user
messages, order, exactly-once delivery or security; the changed code must still import.
`tests/unit/test_mutations.py` keeps the list in step with the source, the tests and `docs/testing.md`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """One decision, broken."""

    name: str
    file: str
    """Relative to the repository."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    breaks: str
    """One sentence: which decision is broken, and what it would cost a user."""
    tests: tuple[str, ...]
    """Paths or node ids of tests of the first ring: at least one must fail."""

    @property
    def package(self) -> str:
        """The package of `src/penstock` that it is in."""
        return self.file.split("/")[2]


MUTATIONS: tuple[Mutation, ...] = (
    # -- app -------------------------------------------------------------------------------------------------------
    Mutation(
        name="results-without-a-marker",
        file="src/penstock/app/commits.py",
        old='batch.content.add(one.marker, b"", expected_last_subject_sequence=0)',
        new='batch.content.add(one.marker, b"")',
        breaks="The results of a message that is delivered again are stored a second time.",
        tests=("tests/integration/app/test_app.py::test_results_are_stored_once_although_messages_come_again",),
    ),
    Mutation(
        name="forget-what-was-handled",
        file="src/penstock/app/handled.py",
        old='await retrying(lambda: self._ids.add(key, b"%d" % message.sequence), NOTED_WITHIN)',
        new="await retrying(lambda: self._ids.newest(key), NOTED_WITHIN)",
        breaks="With `once`, the id of a finished event is not written, so its handler is started again.",
        tests=("tests/integration/app/test_app.py::test_an_event_that_was_finished_is_not_started_again",),
    ),
    # -- cli -------------------------------------------------------------------------------------------------------
    Mutation(
        name="plan-always-exits-0",
        file="src/penstock/cli/platform.py",
        old="return EXIT_ATTENTION if made or made.unreached else EXIT_OK",
        new="return EXIT_OK",
        breaks="`penstock plan` exits with 0 although something would change, so CI lets drift pass.",
        tests=("tests/e2e/topology/test_platform_cli.py::test_prune_removes_what_is_no_longer_declared",),
    ),
    Mutation(
        name="wrong-usage-exits-1",
        file="src/penstock/cli/main.py",
        old="sys.exit(EXIT_USAGE)",
        new="sys.exit(EXIT_ERROR)",
        breaks="Wrong usage exits with 1 instead of 64, so a script cannot tell a mistyped command from a failed one.",
        tests=("tests/e2e/topology/test_lint_cli.py::test_wrong_usage_exits_64",),
    ),
    # -- consume ---------------------------------------------------------------------------------------------------
    Mutation(
        name="acknowledge-what-failed",
        file="src/penstock/consume/durable.py",
        old="            self._give_back(message, verdict.after)\n",
        new="            self._done(message)\n",
        breaks="A message whose handler failed is acknowledged instead of delivered again: it is lost.",
        tests=(
            "tests/integration/app/test_app.py"
            "::test_failures_are_tried_again_as_the_consumer_says_and_then_become_letters",
        ),
    ),
    # -- deadletter ------------------------------------------------------------------------------------------------
    Mutation(
        name="store-a-letter-twice",
        file="src/penstock/deadletter/capture.py",
        old='headers = {**_fitting(letter, connection), EXPECT_LAST: "0"}',
        new="headers = {**_fitting(letter, connection)}",
        breaks="A letter is stored although its subject has one, so worker and advisory make two letters of a message.",
        tests=(
            "tests/integration/deadletter/test_capture.py::test_worker_and_advisory_at_the_same_time_store_one_letter",
        ),
    ),
    Mutation(
        name="forget-the-audit",
        file="src/penstock/deadletter/capture.py",
        old="return began is None or record.time is None or record.time >= began",
        new="return False",
        breaks="A late advisory brings back a letter that was replayed already, and the event is processed twice.",
        tests=(
            "tests/integration/deadletter/test_capture.py"
            "::test_a_late_capture_of_a_letter_that_was_settled_meanwhile_stores_nothing",
        ),
    ),
    Mutation(
        name="swallow-a-new-failure",
        file="src/penstock/deadletter/capture.py",
        old="record.time is None or record.time >= began",
        new="record.time is None or record.time >= began or True",
        breaks="A failure after its letter was settled is taken for the old one: the message is in no dead letter.",
        tests=(
            "tests/integration/deadletter/test_capture.py::test_a_failure_after_the_letter_was_settled_is_a_new_letter",
        ),
    ),
    Mutation(
        name="remove-what-was-not-stored",
        file="src/penstock/deadletter/replay.py",
        old="await self._remove([filed for filed, _ in stored])",
        new="await self._remove([filed for filed, _ in ready])",
        breaks="A replay deletes letters whose messages the stream refused: these events are lost.",
        tests=("tests/integration/deadletter/test_replay.py::test_a_letter_stays_when_its_message_cannot_be_stored",),
    ),
    Mutation(
        name="let-go-before-the-letter",
        file="src/penstock/deadletter/capturer.py",
        old="done = await self._stored(advisory, message, consumer, dlq, captured_by)\n",
        new=(
            "await let_go(self._connection, advisory.stream, advisory.consumer, advisory.sequence)\n"
            "        done = await self._stored(advisory, message, consumer, dlq, captured_by)\n"
        ),
        breaks="A dead message is acknowledged before its letter is stored: when that fails, the message is gone.",
        tests=(
            "tests/integration/deadletter/test_poison.py"
            "::test_a_message_whose_letter_cannot_be_stored_stays_in_its_stream",
        ),
    ),
    # -- events ----------------------------------------------------------------------------------------------------
    Mutation(
        name="leftover-bytes-are-fine",
        file="src/penstock/events/avro.py",
        old="if left := len(body) - source.tell():",
        new="if left := 0:",
        breaks="A body with bytes behind its Avro datum is read as if it were whole: other data is shown than sent.",
        tests=("tests/unit/events/test_documents.py::test_a_body_with_more_than_its_event_is_not_read_by_the_schema",),
    ),
    # -- facts -----------------------------------------------------------------------------------------------------
    Mutation(
        name="forged-receipt",
        file="src/penstock/facts/receipt.py",
        old="if not any(hmac.compare_digest(_signature(key, head, body), signature) for key in keys):",
        new="if len(signature) != SIGNATURE_BYTES:",
        breaks="A receipt with a wrong signature is accepted: anybody confirms facts that a reader has not processed.",
        tests=("tests/unit/facts/test_receipts.py::test_a_receipt_that_was_changed_anywhere_is_refused",),
    ),
    Mutation(
        name="foreign-receipt",
        file="src/penstock/facts/receipt.py",
        old="if (receipt.stream, receipt.consumer) != (stream, consumer):",
        new="if receipt.stream != stream:",
        breaks="A receipt of another consumer is accepted, which confirms facts that this one has never fetched.",
        tests=(
            "tests/unit/facts/test_receipts.py::test_a_receipt_of_another_consumer_is_refused_and_says_whose_it_is",
        ),
    ),
    Mutation(
        name="same-id-other-content",
        file="src/penstock/facts/append.py",
        old="and _header(found.headers, DIGEST_HEADER) == made.mark",
        new="and bool(made.mark)",
        breaks="Another fact under a known id is reported as stored, although only the first one is: it is lost.",
        tests=("tests/integration/facts/test_appending.py::test_the_same_id_with_other_content_is_a_conflict",),
    ),
    Mutation(
        name="hand-out-confirmed-facts",
        file="src/penstock/facts/pages.py",
        old="if within(done, one.sequence):",
        new="if within(done, one.sequence) and one.attempt > 1:",
        breaks="Confirmed facts that a killed server delivers again are handed out again: the reader sees them twice.",
        tests=(
            "tests/unit/facts/test_pages.py::test_a_confirmed_fact_that_the_server_delivers_again_is_not_handed_out",
        ),
    ),
    Mutation(
        name="confirm-before-the-book",
        file="src/penstock/facts/reader.py",
        old="if await self._write(look, look.book.confirmed(receipt.page, look.now), patience):",
        new="if True:",
        breaks="A page is acknowledged without the book saying so: what the server forgets in a crash comes again.",
        tests=(
            "tests/integration/facts/test_named_readers.py::test_confirming_twice_is_harmless_also_from_another_instance",
        ),
    ),
    Mutation(
        name="trust-the-last-acknowledgement-anywhere",
        file="src/penstock/facts/reader.py",
        old="return info.leader is None and not self._link.settings.domain and connection.info.jetstream",
        new="return connection.connected",
        breaks="Acknowledgements that a server in between loses are taken for done: confirmed facts come again later.",
        tests=(
            "tests/integration/facts/test_page_traffic.py"
            "::test_acknowledgements_that_another_server_loses_are_sent_again",
        ),
    ),
    Mutation(
        name="pulled-ahead-of-a-reset",
        file="src/penstock/facts/ahead.py",
        old="return now.created == then.created and now.delivered_consumer_seq >= then.delivered_consumer_seq",
        new="return now.created == then.created",
        breaks="Facts that were pulled before the consumer was reset are handed out after it, out of order.",
        tests=(
            "tests/integration/facts/test_page_traffic.py::test_what_was_pulled_ahead_of_a_reset_is_not_handed_out",
        ),
    ),
    # -- gateway ---------------------------------------------------------------------------------------------------
    Mutation(
        name="expired-token",
        file="src/penstock/gateway/grants.py",
        old="and (token.expires is None or now < token.expires):",
        new="and bool(now):",
        breaks="A bearer token is accepted after it has expired.",
        tests=("tests/integration/gateway/test_gateway.py::test_nobody_gets_in_without_valid_papers",),
    ),
    Mutation(
        name="append-anywhere",
        file="src/penstock/gateway/grants.py",
        old="if not fine or not subjects.covered(subject, identity.subjects):",
        new="if not fine:",
        breaks="A caller may append facts to subjects that are not granted to it.",
        tests=("tests/integration/gateway/test_gateway.py::test_whatever_is_not_granted_is_refused",),
    ),
    # -- jetstream -------------------------------------------------------------------------------------------------
    Mutation(
        name="ignore-a-lost-revision",
        file="src/penstock/jetstream/kv.py",
        old="if found and found.data == data and found.sequence != expected:",
        new="if found and found.sequence != expected:",
        breaks="A write whose answer was lost counts as ours although somebody else's value is there: two owners.",
        tests=("tests/integration/jetstream/test_kv.py::test_a_lost_answer_is_decided_by_a_look_at_the_key",),
    ),
    Mutation(
        name="short-acknowledgement-subjects-only",
        file="src/penstock/jetstream/consumer.py",
        old="start = 4 if len(tokens) <= SHORT_FORM else 6",
        new="start = 4",
        breaks="Deliveries of a server that names domain and account are read wrongly: sequences are not theirs.",
        tests=(
            "tests/unit/jetstream/test_consumer_codec.py::test_every_form_of_an_acknowledgement_subject_says_the_same",
        ),
    ),
    Mutation(
        name="repeat-a-lost-delete",
        file="src/penstock/jetstream/api.py",
        old="return await self._repeat(what, verb, body, _nothing_was_done)",
        new="return await self._repeat(what, verb, body, retry.is_retryable)",
        breaks="A delete, purge or reset whose answer was lost is sent again, which can delete what was created since.",
        tests=("tests/unit/jetstream/test_lost_answers.py::test_what_must_not_be_done_twice_is_asked_for_once",),
    ),
    Mutation(
        name="absent-when-nobody-answers",
        file="src/penstock/jetstream/api.py",
        old='if missing := answer.get("missing"):',
        new='if (missing := answer.get("missing")) and not answer:',
        breaks="Streams whose servers do not answer are taken for absent, so that a plan would create them again.",
        tests=(
            "tests/unit/jetstream/test_lost_answers.py::test_a_listing_from_which_servers_left_something_out_is_an_error",
        ),
    ),
    Mutation(
        name="reset-beyond-the-end",
        file="src/penstock/jetstream/api.py",
        old="refuse_beyond_end(await self.stream_info(stream), seq)",
        new="await self.stream_info(stream)",
        breaks="A consumer can be reset beyond the end of its stream and then silently skips messages to come.",
        tests=(
            "tests/integration/jetstream/test_jetstream_api.py"
            "::test_a_consumer_is_never_moved_beyond_the_end_of_its_stream",
        ),
    ),
    Mutation(
        name="trust-a-lagging-replica",
        file="src/penstock/jetstream/reader.py",
        old="if info.state.last_seq < wanted.last:\n            return True",
        new="if info.state.last_seq < wanted.last:\n            return False",
        breaks="A range is taken for complete although the leader has not caught up with its end: rows are lost.",
        tests=("tests/integration/jetstream/test_reader.py::test_a_range_beyond_the_stream_stalls_with_a_reason",),
    ),
    # -- observe ---------------------------------------------------------------------------------------------------
    Mutation(
        name="age-of-an-acknowledged-message",
        file="src/penstock/observe/collecting.py",
        old="consumer.ack_floor_stream_seq + 1, f)",
        new="consumer.ack_floor_stream_seq, f)",
        breaks="The lag of a consumer is the age of a message it has acknowledged: alerts fire without a reason.",
        tests=(
            "tests/integration/observe/test_status.py"
            "::test_lag_counts_messages_and_the_age_of_the_oldest_unacknowledged_one",
        ),
    ),
    Mutation(
        name="lag-without-what-is-in-flight",
        file="src/penstock/observe/collecting.py",
        old="lag_messages=info.unprocessed,",
        new="lag_messages=info.pending,",
        breaks="Messages that were delivered and not acknowledged are not counted as lag: a stuck handler shows none.",
        tests=(
            "tests/integration/observe/test_status.py"
            "::test_lag_counts_messages_and_the_age_of_the_oldest_unacknowledged_one",
        ),
    ),
    # -- packs -----------------------------------------------------------------------------------------------------
    Mutation(
        name="trust-the-size-of-a-pack",
        file="src/penstock/packs/codec.py",
        old="> marks.MAX_PLAIN_BYTES:\n        raise MalformedPack(",
        new="> marks.MAX_PLAIN_BYTES**2:\n        raise MalformedPack(",
        breaks="Anybody who may publish fills the memory of a reader with a small message.",
        tests=(
            "tests/unit/packs/test_packs.py"
            "::test_a_pack_that_would_fill_the_memory_is_refused_before_it_is_decompressed",
        ),
    ),
    Mutation(
        name="trust-the-rows-of-a-pack",
        file="src/penstock/packs/codec.py",
        old="if batch.num_rows != mark.rows:",
        new="if False:",
        breaks="A pack that was cut off is read without its last rows, and nobody notices that they are missing.",
        tests=("tests/unit/packs/test_packs.py::test_a_pack_that_is_not_what_its_headers_say_is_refused",),
    ),
    # -- publish ---------------------------------------------------------------------------------------------------
    Mutation(
        name="commit-without-the-last-message",
        file="src/penstock/publish/batch.py",
        old="yield self._encoded(len(self), first_reply, last_reply)",
        new="yield self._encoded(len(self) - 1, first_reply, last_reply)",
        breaks="A batch is committed without its last message, which is lost although the rest is stored.",
        tests=("tests/unit/publish/test_batch.py::test_the_server_reads_the_members_in_order_however_they_are_sent",),
    ),
    Mutation(
        name="commit-after-an-exception",
        file="src/penstock/publish/atomic.py",
        old="        if kind is None:\n            await self.commit()",
        new="        if kind is None or len(self.content):\n            await self.commit()",
        breaks="An exception inside the block commits half of a batch instead of dropping it: not all or nothing.",
        tests=("tests/integration/publish/test_atomic_batches.py::test_an_exception_inside_stores_nothing",),
    ),
    Mutation(
        name="batch-of-another-stream",
        file="src/penstock/publish/batch.py",
        old='stream = headers.line(EXPECTED_STREAM, self.stream) if bound else b""',
        new='stream = b""',
        breaks="A batch does not say which stream it is for, and is stored in another one that has its subjects.",
        tests=("tests/unit/publish/test_batch.py::test_the_server_reads_the_members_in_order_however_they_are_sent",),
    ),
    Mutation(
        name="flow-ack-settles-what-was-sent",
        file="src/penstock/publish/ingest.py",
        old="count = min(seq, segment.sent) - segment.acked",
        new="count = segment.sent - segment.acked",
        breaks="A flow ack settles all rows that were sent, not those it names: rows that get lost are not sent again.",
        tests=("tests/unit/publish/test_ingest.py::test_the_first_message_goes_alone_and_its_answer_opens_the_window",),
    ),
    Mutation(
        name="doubtful-rows-sent-again",
        file="src/penstock/publish/ingest.py",
        old='or (self.options.on_doubt == "fail" and without_id):',
        new='or (self.options.on_doubt == "fail" and without_id and not doubtful):',
        breaks="Rows without a message id that a restarted server may have stored are sent again: duplicates.",
        tests=("tests/unit/publish/test_ingest.py::test_a_forgotten_batch_leaves_rows_without_an_id_in_doubt",),
    ),
    # -- server ----------------------------------------------------------------------------------------------------
    Mutation(
        name="monitoring-for-everybody",
        file="src/penstock/server/server_config.py",
        old="f\"http: {quoted(f'{LOOPBACK}:-1')}\",",
        new="f\"http: {quoted(f'{config.host}:-1')}\",",
        breaks="A server that takes clients from other machines shows them its monitoring pages too, without a login.",
        tests=(
            "tests/unit/server/test_server_config.py"
            "::test_another_host_opens_clients_and_leaf_nodes_but_not_monitoring_and_routes",
        ),
    ),
    # -- sourcing --------------------------------------------------------------------------------------------------
    Mutation(
        name="answer-before-it-is-stored",
        file="src/penstock/sourcing/flow.py",
        old="self._questions[0].sequence <= self.stored:",
        new="self._questions[0].sequence <= self.sequence:",
        breaks="The origin is told too early that messages are stored, and a WorkQueue origin deletes them: loss.",
        tests=(
            "tests/integration/sourcing/test_receiver.py"
            "::test_what_the_sink_has_not_stored_is_not_acknowledged_and_comes_again",
        ),
    ),
    Mutation(
        name="skip-the-bridge-fence",
        file="src/penstock/sourcing/bridge.py",
        old="if last != self._predecessor or self._statistics.stored:",
        new="if last is None and self._statistics.stored:",
        breaks="Two instances of a bridge write to one destination in turns, and neither stops.",
        tests=("tests/e2e/sourcing/test_bridge.py::test_an_instance_that_was_taken_over_does_not_take_over_again",),
    ),
    Mutation(
        name="copy-orders-to-the-server",
        file="src/penstock/sourcing/copies.py",
        old="|Nats-Rollup",
        new="|Nats-Rollups",
        breaks="A rollup header is copied, and the destination acts on it again: it deletes messages.",
        tests=("tests/unit/sourcing/test_copies.py::test_instructions_to_the_server_go_and_everything_else_stays",),
    ),
    Mutation(
        name="forged-mark-of-a-bridge",
        file="src/penstock/sourcing/copies.py",
        old='dropped + rb".*?\\r\\n"',
        new='dropped + rb"[^\\r\\n]*\\r\\n"',
        breaks="A publisher writes a mark with half a line end in it, and so says how far the bridge has come.",
        tests=("tests/unit/sourcing/test_copies.py::test_no_publisher_hides_or_forges_the_mark",),
    ),
    Mutation(
        name="forged-subject-of-direct-get",
        file="src/penstock/workers/pull/stored.py",
        old="values[name][-1]",
        new="values[name][0]",
        breaks="A publisher chooses by a header as which subject and sequence a worker handles its message.",
        tests=(
            "tests/integration/workers/test_stored.py::test_a_publisher_chooses_neither_subject_nor_sequence_nor_time",
        ),
    ),
    Mutation(
        name="resume-one-message-early",
        file="src/penstock/sourcing/bridge.py",
        old="return self.mark.sequence if self.mark else 0",
        new="return self.mark.sequence - 1 if self.mark else 0",
        breaks="After a crash a bridge copies the last message that is stored once more: a duplicate.",
        tests=("tests/e2e/sourcing/test_bridge.py::test_what_the_origin_delivers_again_is_not_stored_again",),
    ),
    Mutation(
        name="bridge-without-expected-sequence",
        file="src/penstock/sourcing/bridge.py",
        old="part.lines[0] += headers.line(EXPECTED_LAST, str(self._last))",
        new='part.lines[0] += b""',
        breaks="A batch of a bridge expects no last sequence, so two writers store in turns: duplicates, wrong order.",
        tests=(
            "tests/e2e/sourcing/test_bridge.py"
            "::test_a_bridge_stores_nothing_behind_what_somebody_else_has_written_meanwhile",
        ),
    ),
    # -- spark -----------------------------------------------------------------------------------------------------
    Mutation(
        name="acknowledge-before-commit",
        file="src/penstock/spark/source.py",
        old="        self._first_end = end if news.logged.open_start else None\n",
        new=(
            "        self._first_end = end if news.logged.open_start else None\n"
            "        self._commit(replace(begin, sequence=max(end, begin.sequence)), info)\n"
        ),
        breaks="A micro-batch is acknowledged when it is planned, before Spark has committed it: a crash loses it.",
        tests=(
            "tests/integration/spark/test_source_durable.py::test_a_commit_on_a_limits_stream_moves_the_durable",
            "tests/integration/spark/test_source_durable.py::test_a_commit_deletes_exactly_the_range",
        ),
    ),
    Mutation(
        name="commit-one-message-too-far",
        file="src/penstock/spark/commit.py",
        old="if sequence > self._sequence:",
        new="if sequence > self._sequence + 1:",
        breaks="A commit acknowledges the first message of the next micro-batch: a WorkQueue deletes it unread.",
        tests=("tests/integration/spark/test_source_durable.py::test_a_commit_deletes_exactly_the_range",),
    ),
    Mutation(
        name="purge-what-was-skipped",
        file="src/penstock/spark/commit.py",
        old="return first > floor(durable)",
        new="return True",
        breaks="A commit deletes messages of a work queue that an operator has skipped and the query has never read.",
        tests=("tests/integration/spark/test_source_durable.py::test_what_was_skipped_by_an_operator_is_not_purged",),
    ),
    Mutation(
        name="drop-a-pack-that-cannot-be-read",
        file="src/penstock/spark/unpack.py",
        old="        if own is None:\n            continue\n",
        new="        if own is None:\n            start = place + 1\n            continue\n",
        breaks="A message that calls itself a pack and is none vanishes from a query: its rows are lost silently.",
        tests=("tests/unit/spark/test_unpack.py::test_a_pack_that_cannot_be_read_comes_as_the_message_that_it_is",),
    ),
    Mutation(
        name="chunks-by-place-alone",
        file="src/penstock/spark/task.py",
        old="if chunk.digest() != known.intent.digest:",
        new="if len(chunk) != known.intent.rows:",
        breaks="A retried task skips chunks whose rows are others than those written: rows are lost and repeated.",
        tests=("tests/integration/spark/test_task.py::test_rows_that_come_again_in_another_order_are_written_once",),
    ),
    Mutation(
        name="skip-the-ledger-fence",
        file="src/penstock/spark/ledger.py",
        old="return self._ledger.put(self._key, entry, self._revision, headers)",
        new="return self._ledger.put(self._key, entry, None, headers)",
        breaks="An attempt that was overtaken goes on writing beside the newer one: rows are stored twice.",
        tests=("tests/integration/spark/test_ledger.py::test_a_second_attempt_sees_what_the_first_wrote_and_stops_it",),
    ),
    Mutation(
        name="leave-out-without-a-claim",
        file="src/penstock/spark/earlier.py",
        old="if self._claim(part):",
        new="if self._pool:",
        breaks="Two tasks of a re-run take the same stored row for theirs: an equal row is lost.",
        tests=(
            "tests/integration/spark/test_task.py::test_equal_rows_in_several_partitions_are_written_as_often_as_they_come",
        ),
    ),
    Mutation(
        name="closed-is-written",
        file="src/penstock/spark/task.py",
        old="if closed and (closed.rows is None or finished == SKIP):",
        new="if closed:",
        breaks="A checkpoint that is one batch back loses what Spark planned anew.",
        tests=(
            "tests/integration/spark/test_task.py::test_a_closed_batch_that_comes_with_other_rows_loses_nothing_silently",
        ),
    ),
    Mutation(
        name="expired-is-no-loss",
        file="src/penstock/spark/loss.py",
        old="return max(0, min(self.first - 1, last) - first + 1) + self.inside(first, last)",
        new="return self.inside(first, last)",
        breaks="Messages that expired before they were read are not reported as lost: the query goes on without them.",
        tests=("tests/unit/spark/test_offsets.py::test_losses_are_counted",),
    ),
    Mutation(
        name="vanished-while-reading",
        file="src/penstock/spark/source.py",
        old="if part.expected is not None and part.expected.short(rows, first_row):",
        new="if part.expected is not None and rows > part.value.last:",
        breaks="Messages that are purged between planning and reading are missed by no task: fewer rows, and no error.",
        tests=(
            "tests/integration/spark/test_source_losses.py::test_what_vanishes_between_planning_and_reading_is_an_error",
        ),
    ),
    Mutation(
        name="removal-is-a-loss",
        file="src/penstock/spark/loss.py",
        old="if self.inside_may_go and stream_first <= self.first_row:",
        new="if self.inside_may_go and stream_first < 0:",
        breaks="A message that ends by its own time to live, or is rolled up, fails the query as if it were lost.",
        tests=(
            "tests/integration/spark/test_source_losses.py::test_what_publishers_remove_between_planning_and_reading_is_no_loss",
        ),
    ),
    Mutation(
        name="silent-pipeline-is-running",
        file="src/penstock/spark/progress.py",
        old="now - self.heard > SILENT_AFTER",
        new="self.heard > now + SILENT_AFTER",
        breaks="A pipeline whose driver died is shown as running, and nobody is told.",
        tests=("tests/unit/spark/test_progress.py::test_a_running_pipeline_that_says_nothing_is_silent",),
    ),
    # -- testing ---------------------------------------------------------------------------------------------------
    Mutation(
        name="eventually-gives-up-quietly",
        file="src/penstock/testing/polling.py",
        old=(
            "raise AssertionError(_report(condition, within, what, value, complaint, shown)) from complaint\n"
            "        time.sleep(PAUSE)"
        ),
        new="return cast(T, shown)\n        time.sleep(PAUSE)",
        breaks="A wait that ends in vain passes: tests of users, and ours, stay green while nothing happens.",
        tests=("tests/unit/testing/test_polling.py::test_the_timeout_says_what_was_waited_for_and_the_state",),
    ),
    Mutation(
        name="dead-counts-as-done",
        file="src/penstock/testing/handlers.py",
        old="if not any(dead.message.sequence == message.sequence for dead in self._run.dead):",
        new="if message:",
        breaks="The handler kit reports messages that were given up as done, so a user's test hides a dead letter.",
        tests=("tests/unit/workers/dispatch/test_handler_kit.py::test_what_is_given_up_comes_with_its_reason",),
    ),
    # -- topology --------------------------------------------------------------------------------------------------
    Mutation(
        name="destroy-without-a-flag",
        file="src/penstock/topology/apply.py",
        old="if change.destroys or change.risk is Risk.IMPOSSIBLE]",
        new="if change.risk is Risk.IMPOSSIBLE]",
        breaks="`penstock apply` deletes messages and positions without --allow-destroy.",
        tests=(
            "tests/integration/topology/test_reconcile.py"
            "::test_a_change_that_the_server_would_make_is_refused_when_it_loses_something",
        ),
    ),
    Mutation(
        name="a-lower-limit-is-safe",
        file="src/penstock/topology/risk.py",
        old='return Verdict(Risk.LOSES_DATA, f"the oldest message is',
        new='return Verdict(Risk.SAFE, f"the oldest message is',
        breaks="A plan calls a shorter max_age safe although the server deletes older messages at once.",
        tests=("tests/unit/topology/test_plan.py::test_what_a_change_of_a_stream_costs",),
    ),
    Mutation(
        name="change-what-others-own",
        file="src/penstock/topology/ownership.py",
        old="return None if owner(config) in (None, DEFAULT_NAME, platform) else owner(config)",
        new="return None",
        breaks="A platform changes streams that another platform owns.",
        tests=("tests/unit/topology/test_plan.py::test_what_another_platform_owns_is_not_changed",),
    ),
    # -- ui --------------------------------------------------------------------------------------------------------
    Mutation(
        name="forms-of-other-sites",
        file="src/penstock/ui/app.py",
        old='if not access.is_own_form(person, page.field("token")):',
        new="if False:",
        breaks="Any site that an operator visits can pause, reset and discard in their name.",
        tests=("tests/integration/ui/test_pages.py::test_a_form_of_another_site_is_refused",),
    ),
    Mutation(
        name="another-figure-on-a-page",
        file="src/penstock/ui/pages.py",
        old="known = [lags[one.id].messages for one in some if one.id in lags]",
        new="known = [one.handoff for one in some if one.id in lags]",
        breaks="A page shows another figure than what is measured: an operator looks at the wrong partition.",
        tests=("tests/e2e/ui/test_same_figures.py::test_a_group_is_that_of_group_show",),
    ),
    Mutation(
        name="the-past-is-now",
        file="src/penstock/ui/pages.py",
        old="    if page.past:\n        found = snapshot.stream(name)",
        new="    if False:\n        found = snapshot.stream(name)",
        breaks="The time machine shows what a stream is now as what it was then.",
        tests=("tests/e2e/ui/test_same_figures.py::test_the_time_machine_shows_what_commands_would_have_told_then",),
    ),
    # -- web -------------------------------------------------------------------------------------------------------
    Mutation(
        name="connections-without-limit",
        file="src/penstock/web/listener.py",
        old="if self.taken.total() >= self.total or self.taken[origin] >= self.per_address:",
        new="if self.taken.total() >= self.total:",
        breaks="One caller takes all connections, and nobody else is answered.",
        tests=("tests/unit/gateway/test_bounds.py::test_places_are_counted_in_all_and_by_address",),
    ),
    # -- wire ------------------------------------------------------------------------------------------------------
    Mutation(
        name="smuggled-header",
        file="src/penstock/wire/headers.py",
        old='_BAD_VALUE = re.compile(r"[\\r\\n\\0]")',
        new='_BAD_VALUE = re.compile(r"[\\0]")',
        breaks="A header value with a line break forges other headers, such as a message id or an expected sequence.",
        tests=("tests/unit/wire/test_frames.py::test_a_header_cannot_smuggle_another",),
    ),
    Mutation(
        name="half-a-delivery",
        file="src/penstock/wire/deliveries.py",
        old='if not ended(b"\\r\\n", end):',
        new="if end > len(raw):",
        breaks="A delivery without its end is taken for complete, so a handler gets the bytes of a broken frame.",
        tests=("tests/unit/wire/test_deliveries.py::test_skimming_and_parsing_find_what_parsing_alone_finds",),
    ),
    # -- metrics ---------------------------------------------------------------------------------------------------
    Mutation(
        name="bucket-without-its-bound",
        file="src/penstock/metrics/families.py",
        old="rows.append((bound, float(running)))",
        new="rows.append((bound, float(count)))",
        breaks="The buckets of a histogram do not add up, so Prometheus computes wrong percentiles.",
        tests=("tests/unit/consume/test_metrics.py::test_a_bucket_holds_its_upper_bound",),
    ),
    # -- workers ---------------------------------------------------------------------------------------------------
    Mutation(
        name="skip-the-worker-fence",
        file="src/penstock/workers/dispatch/dispatcher.py",
        old="if token_of(lane_id) != token:",
        new="if token is None:",
        breaks="A worker acknowledges a message whose partition went to another worker, where it may still fail: loss.",
        tests=(
            "tests/unit/workers/dispatch/test_dispatch.py"
            "::test_a_message_that_was_handled_while_the_lease_was_in_doubt_is_done_once_it_is_not",
        ),
    ),
    Mutation(
        name="handoff-sequence-plus-one",
        file="src/penstock/workers/dispatch/lanes.py",
        old="return self.order[0] - 1 if self.order else max(self.last_done, self.floor, cursor)",
        new="return self.order[0] if self.order else max(self.last_done, self.floor, cursor)",
        breaks="The handoff sequence is one too high: the next owner never handles the first message that was left.",
        tests=("tests/unit/workers/dispatch/test_lanes.py::test_nothing_passes_a_message_that_waits_for_its_next_try",),
    ),
    Mutation(
        name="handoff-goes-back",
        file="src/penstock/workers/group/claims.py",
        old="done = max(self.handoff, reached.done)",
        new="done = reached.done",
        breaks="The claim of a worker that died without a known ack floor starts over at 0: everything comes twice.",
        tests=("tests/unit/workers/group/test_handoff.py::test_the_ack_floor_counts_only_for_what_is_settled",),
    ),
    Mutation(
        name="record-under-any-token",
        file="src/penstock/workers/group/claims.py",
        old="return found if found and found.token == token else None",
        new="return found",
        breaks="What a worker wrote down before it lost a partition counts for its next owner: messages are lost.",
        tests=("tests/unit/workers/group/test_handoff.py::test_a_record_counts_under_its_token_and_for_its_stream",),
    ),
    Mutation(
        name="caught-up-by-the-cursor",
        file="src/penstock/workers/dispatch/lanes.py",
        old="if self.limit != NO_LIMIT:  # what",
        new="if self.limit > NO_LIMIT:  # what",
        breaks="A backlog that the consumer passed over counts as done, since its cursor is beyond it: it is lost.",
        tests=(
            "tests/unit/workers/dispatch/test_lanes.py::test_a_lane_that_has_nothing_left_is_done_up_to_the_last_that_came",
        ),
    ),
    Mutation(
        name="ack-floor-while-catching-up",
        file="src/penstock/workers/group/handoff.py",
        old="acknowledged = floor or 0 if claim.settled else 0",
        new="acknowledged = floor or 0",
        breaks="The ack floor of a worker that died while catching up counts as its handoff: the backlog is skipped.",
        tests=("tests/unit/workers/group/test_handoff.py::test_the_ack_floor_counts_only_for_what_is_settled",),
    ),
    Mutation(
        name="token-outlives-the-lease",
        file="src/penstock/workers/group/claims.py",
        old="return claim.token if claim and self._lease.valid else None",
        new="return claim.token if claim else None",
        breaks="A worker handles messages after its lease has ended, at the same time as the next owner.",
        tests=("tests/integration/workers/test_coordination_kv.py::test_a_token_ends_with_the_lease",),
    ),
    Mutation(
        name="pass-a-message-that-waits",
        file="src/penstock/workers/dispatch/lanes.py",
        old="if self.held or self.waits or not self.order or self.order[0] > self.limit:",
        new="if self.held or not self.order or self.order[0] > self.limit:",
        breaks="A message that waits for its next try is tried at once, again and again, whatever the backoff says.",
        tests=("tests/unit/workers/dispatch/test_lanes.py::test_nothing_passes_a_message_that_waits_for_its_next_try",),
    ),
    Mutation(
        name="pass-a-backlog",
        file="src/penstock/workers/dispatch/dispatcher.py",
        old="(sequence := order[0]) > limit or self.paused",
        new="(sequence := order[0]) < 0 or self.paused",
        breaks="What a consumer delivers is handled before the backlog that it has passed over: the order is lost.",
        tests=(
            "tests/unit/workers/dispatch/test_dispatch.py::test_a_delivery_waits_until_the_backlog_below_it_was_read",
        ),
    ),
    Mutation(
        name="acknowledge-without-a-letter",
        file="src/penstock/workers/dispatch/dispatcher.py",
        old="            self._metrics.failed(exc)\n            return False",
        new="            self._metrics.failed(exc)\n            return True",
        breaks="A message whose dead letter could not be stored is acknowledged all the same: it is lost.",
        tests=(
            "tests/unit/workers/dispatch/test_dispatch.py"
            "::test_a_message_that_is_given_up_is_acknowledged_only_once_its_letter_is_stored",
        ),
    ),
)
