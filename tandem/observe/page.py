"""The frame of ``report.html``: layout and colours, light and dark, without scripts. Filled by ``str.format``."""

from __future__ import annotations

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · Tandem</title>
<style>
:root {{
  --page: #f7f7f5; --card: #ffffff; --ink: #1c1d1f; --soft: #6a6d73; --rule: #e4e4e0;
  --s1: #2563c9; --s2: #d9730d; --s3: #1a8a5f; --s4: #9b4dca; --s5: #c2344d; --s6: #7a7f87;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --page: #131416; --card: #1c1e21; --ink: #e9eaec; --soft: #9a9ea6; --rule: #2e3136;
    --s1: #6ea3f7; --s2: #f2a154; --s3: #4cc497; --s4: #c590ec; --s5: #f07f92; --s6: #a0a5ad;
  }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }}
main {{ max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px; }}
h1 {{ font-size: 24px; margin: 0 0 20px; }}
h1 small, h2 small {{ color: var(--soft); font-weight: 400; font-size: 13px; }}
h2 {{ font-size: 15px; margin: 0 0 8px; }}
dl {{ display: flex; flex-wrap: wrap; gap: 12px; margin: 0 0 20px; }}
dl div, figure, section, details {{ background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }}
dl div {{ padding: 12px 16px; flex: 1 1 auto; }}
dt {{ color: var(--soft); font-size: 13px; }}
dd {{ margin: 2px 0 0; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 16px; }}
figure, section {{ margin: 0; padding: 16px; min-width: 0; }}
section, details {{ margin-top: 16px; }}
svg {{ width: 100%; height: auto; display: block; }}
svg .grid {{ stroke: var(--rule); }}
svg .tick {{ fill: var(--soft); font: 11px system-ui, sans-serif; }}
svg polyline {{ fill: none; stroke-linejoin: round; }}
svg .line {{ stroke-width: 2; }}
svg .raw {{ stroke-width: 1; opacity: .3; }}
svg .area {{ opacity: .85; }}
figure ul {{ list-style: none; display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 8px 0 0; padding: 0; }}
figure li {{ color: var(--soft); font-size: 13px; }}
figure li b {{ color: var(--ink); font-variant-numeric: tabular-nums; }}
figure i {{ display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }}
table {{ border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; vertical-align: top; padding: 4px 16px 4px 0; border-top: 1px solid var(--rule); }}
tr:first-child > * {{ border-top: 0; }}
th {{ color: var(--soft); font-weight: 500; }}
.facts {{ margin: 0 0 20px; }}
.wide {{ overflow-x: auto; }}
pre {{ margin: 0; font: 12px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }}
details {{ padding: 12px 16px; }}
summary {{ cursor: pointer; font-weight: 600; }}
details > :not(summary) {{ margin-top: 12px; }}
.empty {{ color: var(--soft); }}
</style>
</head>
<body>
<main>
<h1>{title} <small>Tandem run</small></h1>
<dl>{tiles}</dl>
{summary}
<div class="charts">{charts}</div>
{samples}
<details><summary>All metrics</summary><div class="wide"><table>{metrics}</table></div></details>
<details><summary>Configuration</summary><pre>{config}</pre></details>
</main>
</body>
</html>
"""
