"""The page's style: light and dark by the reader's preference, narrow screens, print, keyboard."""

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--ink:#1c1d1f;--soft:#5b6068;--line:#d9dbde;--card:#fff;
--good:#0b6b3a;--bad:#a3211b;--maybe:#7a5300;--accent:#1f5fbf;
--states:#3b6fb6;--gathered:#c9822b;--activations:#3f8f6b;--passing:#8a63a8;--outside:#9aa0a8}
@media (prefers-color-scheme:dark){:root{--bg:#15171a;--ink:#e7e8ea;--soft:#a2a8b1;--line:#343941;
--card:#1c1f23;--good:#58c58b;--bad:#ff8a80;--maybe:#e3b457;--accent:#82b1ff;
--states:#6f9fdf;--gathered:#e0a458;--activations:#63b98f;--passing:#b18fce;--outside:#767d87}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:66rem;margin:0 auto;padding:1.5rem 1.25rem 4rem}
h1{font-size:1.5rem;line-height:1.25;margin:.2rem 0 .6rem;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:2.2rem 0 .6rem}
p{margin:.3rem 0;max-width:48rem}
.soft,small{color:var(--soft)}
.fits{color:var(--good)}.does_not_fit{color:var(--bad)}.unknown{color:var(--maybe)}
.skip{position:absolute;left:-999px}.skip:focus{left:1rem;top:1rem;background:var(--card);padding:.5rem}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(10.5rem,1fr));gap:.75rem;margin:1.1rem 0}
dl div{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem}
dt{color:var(--soft);font-size:.82rem}dd{margin:0;font-size:1.15rem;font-variant-numeric:tabular-nums}
dd small{display:block;font-size:.8rem}
svg{display:block;width:100%;height:auto;margin:.4rem 0;font:12px system-ui,sans-serif}
svg text{fill:var(--soft)}svg text.strong{fill:var(--ink);font-weight:600}
.g-states,.k-states{fill:var(--states);background:var(--states)}
.g-gathered,.k-gathered{fill:var(--gathered);background:var(--gathered)}
.g-activations,.k-activations{fill:var(--activations);background:var(--activations)}
.g-passing,.k-passing{fill:var(--passing);background:var(--passing)}
.g-outside,.k-outside{fill:var(--outside);background:var(--outside)}
svg rect[class^=g-]{stroke:var(--bg);stroke-width:.6}
.limit{stroke:var(--bad);stroke-width:1.6;stroke-dasharray:5 4}
.grid{stroke:var(--line);stroke-width:1}
.area{fill:var(--accent);opacity:.16}.stroke{fill:none;stroke:var(--accent);stroke-width:2}
.front{fill:none;stroke:var(--accent);stroke-width:1.4;opacity:.7}
.hover{fill:transparent}.hover:hover{fill:var(--accent);fill-opacity:.18}
.peak{fill:var(--bad)}
.p-off{fill:var(--outside);opacity:.55}.p-on{fill:var(--accent)}
.p-chosen{fill:var(--good);stroke:var(--bg);stroke-width:2}
.key{list-style:none;display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;padding:0;margin:.2rem 0 .6rem;
font-size:.88rem}
.swatch{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em;vertical-align:-.05em}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:.5rem;background:var(--card)}
.tall{max-height:34rem;overflow-y:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem}
caption{position:absolute;left:-999px}
th,td{padding:.38rem .7rem;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
tbody tr:last-child td,tbody tr:last-child th{border-bottom:0}
thead th{position:sticky;top:0;background:var(--card);font-weight:600;white-space:nowrap}
tbody th{font-weight:400}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
tr.chosen{background:color-mix(in srgb,var(--good) 12%,transparent)}
.wide{min-width:14rem}.word{white-space:nowrap}
details{margin:.5rem 0}summary{cursor:pointer;color:var(--accent)}
:focus-visible{outline:3px solid var(--accent);outline-offset:2px}
pre{overflow:auto;background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.8rem;
font-size:.82rem;max-height:30rem}
ul.notes{padding-left:1.1rem}ul.notes li{margin:.35rem 0;max-width:52rem}
footer{margin-top:3rem;color:var(--soft);font-size:.85rem;overflow-wrap:anywhere}
@media (max-width:40rem){main{padding:1rem .75rem 3rem}h1{font-size:1.25rem}svg{font-size:20px}
svg.timeline,svg.scatter{min-width:38rem}.chart{overflow-x:auto}svg.timeline,svg.scatter{font-size:13px}}
@media print{:root{--bg:#fff;--card:#fff;--ink:#000;--soft:#444;--line:#bbb}
main{max-width:none;padding:0}.scroll,.tall{overflow:visible;max-height:none;border:0}
thead th{position:static}section{break-inside:avoid-page}section.long{break-inside:auto}
.screen{display:none}h2{break-after:avoid-page}
tr{break-inside:avoid}body{font-size:11pt}.skip{display:none}}
"""
