"""Model output that could break a page: scripts, links, styles, frames, and characters that are hard to display."""

HOSTILE = [
    payload.replace("HIT", "window.hit=1")
    for payload in (
        "<script>HIT</script>", "<img src=x onerror='HIT'>", "<svg onload='HIT'>", "<iframe srcdoc='<script>HIT</script>'>",
        "</script><script>HIT</script>", "--><script>HIT</script>", "]]><script>HIT</script>", "<b onmouseover='HIT'>b",
        "javascript:HIT", "<a href='javascript:HIT'>a</a>", "{{constructor.constructor('HIT')()}}", "${HIT}", "`${HIT}`",
        "<style>*{display:none}</style>", "<link rel=stylesheet href=http://evil.example/x.css>", "<base href=//evil.example>",
        "<meta http-equiv=refresh content='0;url=http://evil.example'>", "<img src=http://evil.example/pixel.png>",
        "<object data='data:text/html,<script>HIT</script>'>", "<math><mtext><script>HIT</script></mtext></math>",
        "\u202eevil\u202c", "\u0000null", "a\u0301" * 40, "W" * 5000, "\x1b[31mred", "&lt;script&gt;HIT&lt;/script&gt;",
        "<input autofocus onfocus='HIT'>", "<details open ontoggle='HIT'>", "<body onload='HIT'>", "\n\n\n<!--",
        "<template><script>HIT</script></template>", "<noscript><p title='</noscript><img src=x onerror=HIT>'>",
        "'\"><script>HIT</script>", "\\u003cscript\\u003eHIT\\u003c/script\\u003e",
    )
    for payload in (payload, f"before {payload} after", payload.upper() if "HIT" not in payload else f"{payload}{payload}")
]  # fmt: skip
