"""The directory of saved sessions: names, bound, what is refused."""

import pytest

from qwen35.errors import ConfigError, InvalidArgument, StateError, Unsupported
from qwen35.serving.sessions import SessionStore
from tests.engine.fakes import Rig, request

FINGERPRINT = "0123"


@pytest.fixture(scope="module")
def session():
    rig = Rig()
    rig.engine.submit(request(max_tokens=20))
    for _ in range(4):
        rig.step()
    return rig.engine.save(0)


def test_what_is_saved_comes_back(session, tmp_path):
    store = SessionStore(str(tmp_path / "made" / "here"), 1 << 20, FINGERPRINT)
    store.save("a", session)
    assert store.load("a").token_ids == session.token_ids
    assert [path.name for path in (tmp_path / "made" / "here").iterdir()] == ["a"]
    with pytest.raises(InvalidArgument, match="restore_session: expected the name of a saved session, got 'b'"):
        store.load("b")
    with pytest.raises(StateError, match="fingerprint: expected 4567, got 0123"):
        SessionStore(str(tmp_path / "made" / "here"), 1 << 20, "4567").load("a")


def test_all_sessions_together_are_bounded_and_one_replaces_its_own(session, tmp_path):
    store = SessionStore(str(tmp_path), 100_000, FINGERPRINT)
    for _ in range(3):
        store.save("a", session)
    before = (tmp_path / "a").read_bytes()
    (tmp_path / "other").write_bytes(bytes(90_000))
    for name in ("a", "b"):
        with pytest.raises(StateError, match="save_session: expected at most 100000 bytes of sessions in all, got 1"):
            store.save(name, session)
    assert (tmp_path / "a").read_bytes() == before and not (tmp_path / "b").exists()


def test_a_disk_that_fails_is_an_error_without_its_path(session, tmp_path):
    store = SessionStore(str(tmp_path / "gone"), 1 << 20, FINGERPRINT)
    (tmp_path / "gone" / "a").mkdir()
    with pytest.raises(StateError, match="save_session: expected the file to be written, got ") as caught:
        store.save("a", session)
    assert str(tmp_path) not in str(caught.value)


def test_without_a_directory_both_are_refused_by_name(session):
    store = SessionStore("", 1 << 20, FINGERPRINT)
    for refused, field in (
        (lambda: store.load("a"), "restore_session"),
        (lambda: store.save("a", session), "save_session"),
        (lambda: store.check("save_session"), "save_session"),
    ):
        with pytest.raises(Unsupported, match=f"{field}: expected it to be left out .*session_directory is empty"):
            refused()


def test_a_directory_that_can_not_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="session_directory: expected a directory that can be made"):
        SessionStore(str(tmp_path / "file" / "below"), 1 << 20, FINGERPRINT)
