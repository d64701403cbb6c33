"""The style sheet of the pages and pictures of plans: light and dark, narrow screens and paper."""

from __future__ import annotations

LIGHT = """--bg:#fbfbfa;--ink:#1c1d1f;--soft:#5b6068;--line:#d9dbde;--card:#fff;
--good:#0b6b3a;--bad:#a3211b;--maybe:#7a5300;--accent:#1f5fbf;
--states:#3b6fb6;--gathered:#c9822b;--activations:#3f8f6b;--passing:#8a63a8;--outside:#9aa0a8"""
DARK = """--bg:#15171a;--ink:#e7e8ea;--soft:#a2a8b1;--line:#343941;
--card:#1c1f23;--good:#58c58b;--bad:#ff8a80;--maybe:#e3b457;--accent:#82b1ff;
--states:#6f9fdf;--gathered:#e0a458;--activations:#63b98f;--passing:#b18fce;--outside:#767d87"""

CHARTS = """
svg{font:12px system-ui,sans-serif}
svg text{fill:var(--soft)}svg text.strong{fill:var(--ink);font-weight:600}
svg text.halo{paint-order:stroke;stroke:var(--bg);stroke-width:4px;stroke-linejoin:round}
.g-states,.k-states{fill:var(--states);background:var(--states)}
.g-gathered,.k-gathered{fill:var(--gathered);background:var(--gathered)}
.g-activations,.k-activations{fill:var(--activations);background:var(--activations)}
.g-passing,.k-passing{fill:var(--passing);background:var(--passing)}
.g-outside,.k-outside{fill:var(--outside);background:var(--outside)}
svg rect[class^=g-]{stroke:var(--bg);stroke-width:.6}
.limit{stroke:var(--bad);stroke-width:1.6;stroke-dasharray:5 4}
.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.over{fill:var(--bad);opacity:.08}
.area{fill:var(--accent);opacity:.16}.stroke{fill:none;stroke:var(--ink);stroke-width:1.4}
.front{fill:none;stroke:var(--accent);stroke-width:1.4;opacity:.7}
.hover{fill:transparent}.hover:hover{fill:var(--accent);fill-opacity:.18}
.peak{fill:var(--bad);stroke:var(--bg);stroke-width:1.5}
.p-off{fill:var(--outside);opacity:.55}.p-on{fill:var(--accent)}.p-over{fill:var(--bad);opacity:.55}
.here{fill:none;stroke:var(--ink);stroke-width:2}
.p-chosen{fill:var(--good);stroke:var(--bg);stroke-width:2}
"""
"""What charts need, on a page and in a picture of their own."""

STYLE = (
    f"""
:root{{color-scheme:light dark;{LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{DARK}}}}}
{CHARTS}"""
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:66rem;margin:0 auto;padding:1.5rem 1.25rem 4rem}
h1{font-size:1.5rem;line-height:1.25;margin:.2rem 0 .6rem;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:2.2rem 0 .6rem}h3{font-size:1rem;margin:1.4rem 0 .5rem}
p{margin:.3rem 0;max-width:48rem;overflow-wrap:anywhere}
.soft,small{color:var(--soft)}
.fits{color:var(--good)}.does_not_fit{color:var(--bad)}.unknown{color:var(--maybe)}
.skip{position:absolute;left:-999px}.skip:focus{left:1rem;top:1rem;background:var(--card);padding:.5rem}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(10.5rem,1fr));gap:.75rem;margin:1.1rem 0}
dl div{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem}
dt{color:var(--soft);font-size:.82rem}
dd{margin:0;font-size:1.15rem;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
dd small{display:block;font-size:.8rem}dl .small dd{font-size:.98rem}
@media (min-width:24rem){dl .twice{grid-column:span 2}}
svg{display:block;width:100%;height:auto;margin:.4rem 0}
svg.share{height:.8rem}svg.pair{height:1.4rem}
.narrow{display:none}
.key{list-style:none;display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;padding:0;margin:.2rem 0 .6rem;
font-size:.88rem}
.swatch{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em;vertical-align:-.05em}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:.5rem;background:var(--card)}
.tall{max-height:34rem;overflow-y:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem}
caption{position:absolute;left:-999px}
th,td{padding:.38rem .7rem;text-align:left;border-bottom:1px solid var(--line);vertical-align:top;
overflow-wrap:break-word}
tbody tr:last-child td,tbody tr:last-child th{border-bottom:0}
thead th{position:sticky;top:0;background:var(--card);font-weight:600;white-space:nowrap}
tbody th{font-weight:400}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
tr.chosen{background:color-mix(in srgb,var(--good) 12%,transparent)}
ul.tree,ul.tree ul{list-style:none;padding-left:1.1rem;margin:.1rem 0}ul.tree{padding-left:0}
ul.tree details{margin:0}ul.tree li{overflow-wrap:anywhere}ul.tree summary{color:inherit}
.wide{min-width:14rem}.word{white-space:nowrap}
details{margin:.5rem 0}summary{cursor:pointer;color:var(--accent)}
:focus-visible{outline:3px solid var(--accent);outline-offset:2px}
pre{overflow:auto;background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.8rem;
font-size:.82rem;max-height:30rem}
ul.notes{padding-left:1.1rem}ul.notes li{margin:.35rem 0;max-width:52rem;overflow-wrap:anywhere}
footer{margin-top:3rem;color:var(--soft);font-size:.85rem;overflow-wrap:anywhere}
@media (max-width:40rem){main{padding:1rem .75rem 3rem}h1{font-size:1.25rem}
.narrow{display:block}.broad{display:none}
th,td{padding:.34rem .45rem}.wide{min-width:0}
th:has(>.swatch){position:relative;padding-left:1.3rem}th>.swatch{position:absolute;left:.3rem;top:.75em}
pre{white-space:pre-wrap;overflow-wrap:anywhere}
table.plain{font-size:.85rem}table.cards thead{display:none}table.cards tr{display:block;padding:.4rem 0;
border-bottom:1px solid var(--line)}
table.cards tbody tr:last-child{border-bottom:0}
table.cards th,table.cards td{display:grid;grid-template-columns:7rem minmax(0,1fr);gap:0 .6rem;
border:0;padding:.1rem .6rem;text-align:left;white-space:normal;overflow-wrap:anywhere}
table.cards td svg{margin:.2rem 0}table.cards .button{grid-column:2;justify-self:start}
table.cards th{font-weight:600}table.cards td:empty{display:none}
table.cards td::before,table.cards th::before{content:attr(data-head);color:var(--soft);font-weight:400}}
@media print{:root{--bg:#fff;--card:#fff;--ink:#000;--soft:#444;--line:#bbb}
main{max-width:none;padding:0}.scroll,.tall{overflow:visible;max-height:none;border:0}
thead th{position:static}section{break-inside:avoid-page}section.long{break-inside:auto}
.screen{display:none}h2{break-after:avoid-page}.wide{min-width:0}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
tr{break-inside:avoid}body{font-size:9.5pt}
th,td{padding:.16rem .5rem}h2{margin-top:1.2rem}.skip{display:none}}
"""
)
