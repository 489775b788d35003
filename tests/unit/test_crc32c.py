"""Which library computes CRC-32C, in processes of their own: google-crc32c's C part is hidden, as on musl."""

import subprocess
import sys

HIDE = "import sys; sys.modules['google_crc32c.cext'] = sys.modules['google_crc32c._crc32c'] = None; "
USE = "from pushrep.crc32c import crc32c_extend, crc32c_value; print(crc32c_extend(crc32c_value(b'1234'), b'56789'))"
OF_DIGITS = str(0xE3069283)  # RFC 3720's check value, of "123456789"


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_where_c_is_there_nothing_is_said():
    done = run(USE)
    assert (done.stdout.strip(), done.stderr) == (OF_DIGITS, "")


def test_without_c_one_warning_names_the_remedy():
    done = run(HIDE + "sys.modules['crc32c'] = None; " + USE + "; import pushrep.log")
    assert done.stdout.strip() == OF_DIGITS
    assert done.stderr.count("Warning") == 1
    assert "pip install crc32c" in done.stderr


def test_the_package_that_the_warning_names_is_taken():
    stub = "import types; sys.modules['crc32c'] = types.SimpleNamespace(crc32c=lambda data, crc=0: (crc, data)); "
    done = run(
        HIDE + stub + "from pushrep.crc32c import crc32c_extend as e, crc32c_value as v; print(v(b'a'), e(7, b'b'))"
    )
    assert (done.stdout.strip(), done.stderr) == ("(0, b'a') (7, b'b')", "")


def test_the_version_is_the_distributions():
    import importlib.metadata

    import pushrep

    assert pushrep.__version__ == importlib.metadata.version("pushrep")
