"""The console: web pages for operators who look before they read. `pushrep console`; needs the extra `console`.

watch.py       looks at places again and again, by the function of `pushrep status`, and keeps an hour of it
pages.py       readings in, rows out: pure; what is worst, rates, what to do about each problem
records.py     records of one log: payloads only where they are asked for
drawing.py     bars and lines as SVG: pure
web.py         Starlette: a route for each page, what a browser may do with them, the server
templates/     Jinja2; static/ what browsers load: our own style and script, and idiomorph
"""
