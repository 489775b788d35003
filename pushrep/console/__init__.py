"""The console: web pages for operators, read-only. `pushrep console`; needs the extra `console`.

watch.py        reads the status of each place periodically, as `pushrep status` does, and keeps the last hour
pages.py        computes rows from readings: severities, rates, bars and lines of SVG; pure
records.py      reads records of one log; payloads only on request
access.py       who may read: the rule for Host and password; pure, but for the file of the password
web.py          the Starlette application behind its guard, with a route for each page, and the server
templates/      Jinja2 templates
static/         what browsers load: a style sheet and a script
"""
