//! Templates that mean harm.

use std::time::{Duration, Instant};

use octavo::stages::tokenize::{ChatError, ChatTemplate, ContentFormat, LocalTime, RenderInput};
use serde_json::{Value, json};

const NOW: LocalTime = LocalTime { year: 2025, month: 3, day: 4, hour: 5, minute: 6, second: 7 };
/// Under a second on a free machine, optimised; tests share theirs and are not.
const MOST_TIME: Duration = Duration::from_secs(3);
const MOST_BYTES: u64 = 400 << 20;

/// The outcome, or a panic where it does not come.
fn render_in_time(source: &str) -> Result<String, ChatError> {
    let (sender, outcome) = std::sync::mpsc::channel();
    let owned = source.to_owned();
    std::thread::spawn(move || sender.send(render(&owned, json!([]))));
    let shown: String = source.chars().take(150).collect();
    outcome.recv_timeout(4 * MOST_TIME).unwrap_or_else(|_| panic!("{shown}: does not end"))
}

fn render(source: &str, messages: Value) -> Result<String, ChatError> {
    let mut input = RenderInput::new(messages, NOW);
    input.content_format = ContentFormat::OpenAi;
    ChatTemplate::compile(source, "", "").and_then(|template| template.render(&input))
}

/// The largest resident size of this process since it was last reset, which this does. `None` where Linux does not say.
fn peak_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    std::fs::write("/proc/self/clear_refs", "5").ok()?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// `body` forty times, over a namespace `n` with a list `l`, a second one `m`, a text `s` and a mapping `d`.
fn again(body: &str, then: &str) -> String {
    format!(
        "{{% set n = namespace(l=[1], m=[1], s='x', d={{'a': 1}}) %}}{{% for i in range(40) %}}{body}{{% endfor %}}{then}"
    )
}

fn hostile() -> Vec<String> {
    let in_itself = "{% set n.l = [n.l, n.l] %}{% set n.m = [n.m, n.m] %}";
    let mut sources: Vec<String> = [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% macro f(l) %}{{ f(l + l) }}{% endmacro %}{{ f([1]) }}",
        "{% macro f(l) %}{{ f([l, l]) }}{% endmacro %}{{ f([1]) }}",
        "{% for x in [1] recursive %}{{ loop([x, x]) }}{% endfor %}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(64) %}{% set ns.s = ns.s | replace('x', 'xx') %}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ ([1] * 100000000) | list }}",
        "{{ ([1] * 100000000) == ([1] * 100000000) }}",
        "{{ ((((['x'] * 10000) , ) * 10000) | join | length) }}",
        "{{ range(100000000000) | list }}",
        "{{ 'x'.center(10000000000) }}",
        "{{ 'x' | center(10000000000) }}",
        "{{ 'x'.ljust(10000000000) }}",
        "{{ 'x'.zfill(10000000000) }}",
        "{{ 'x'.join(range(99999) | list * 9999) }}",
        "{{ 'x' | indent(10000000000) }}",
        "{{ '\\n' * 100000 | indent(100000) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{0:>10000000000}'.format(1) }}",
        "{{ '{:.10000000000f}'.format(1.0) }}",
        "{{ '{:{}}'.format(1, 10000000000) }}",
        "{{ '{:{w}}'.format(1, w=10000000000) }}",
        "{{ '{:{0}{0}{0}{0}{0}}'.format(99) }}",
        "{{ '%*d' | format(10000000000, 1) }}",
        "{{ '%.*f' | format(10000000000, 1.0) }}",
        "{{ range(99999) | batch(10000000000, 0) | list }}",
        "{{ [1] | slice(10000000000) | list }}",
        "{% set l = range(90000) | list %}{% for i in range(90000) %}{{ l | join }}{% endfor %}",
        "{% set l = range(90000) | list %}{% for i in range(90000) %}{% set x = l | string %}{% endfor %}",
        "{% set l = range(90000) | list %}{% for i in range(90000) %}{% set x = l | tojson %}{% endfor %}",
        "{% set l = range(90000) | list %}{% for i in range(90000) %}{% set x = l | sort %}{% endfor %}",
        "{% set l = range(90000) | list %}{% for i in range(90000) %}{% set x = l + [l] %}{% endfor %}",
        "{% set l = range(90000) | list %}{% for i in range(90000) %}{% if l.index(-1) %}{% endif %}{% endfor %}",
        "{% set l = range(90000) | list %}{% for i in range(90000) %}{% if l.count(l) %}{% endif %}{% endfor %}",
        "{% set l = range(90000) | list %}{% set m = [l] * 90000 %}{{ m.count(range(90000) | list) }}",
        "{% set l = range(90000) | list %}{% for i in range(90000) %}{% if l[0:] == l[0:] %}{% endif %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% for i in range(5000) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}",
        "{% set ns = namespace(l=[]) %}{% for i in range(5000) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l | tojson }}",
        "{% set ns = namespace(l=[]) %}{% for i in range(90000) %}{% set ns.l = [ns.l] %}{% endfor %}",
        "{% set ns = namespace(l={}) %}{% for i in range(90000) %}{% set ns.l = {'l': ns.l} %}{% endfor %}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(90000) %}{% set ns.l = ns.l[0:] %}{% endfor %}{{ ns.l[0] / 0 }}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(90000) %}{% set ns.l = [ns.l[0][0:]] %}{% endfor %}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(90000) %}{% set ns.l = ns.l | map('string') %}{% endfor %}{{ ns.l | first / 0 }}",
        "{% set ns = namespace() %}{% set ns.me = [ns] %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.me = [ns] %}{{ ns == ns.me[0] and 1 / 0 }}",
        "{% include 'chat' %}",
        "{% extends 'chat' %}",
        "{% import 'chat' as chat %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ debug() }}",
    ]
    .map(str::to_owned)
    .into();
    sources.extend([
        again("{% set n.l = n.l + n.l %}", "{{ n.l | length }}{{ n.l }}"),
        again("{% set n.l = n.l * 2 %}", "{{ n.l }}"),
        again("{% set n.l = (n.l + n.l) | list %}", ""),
        again("{% set n.l = n.l | chain(n.l) %}", "{{ n.l }}"),
        again("{% set n.d = n.d | chain(n.d) %}", "{{ n.d }}"),
        again("{% set n.d = dict(a=n.d, b=n.d) %}", "{{ n.d }}"),
        again("{% set n.d = {'a': n.d, 'b': n.d} %}", ""),
        again("{% set n.l = n.l | batch(1) | list + n.l | list %}", ""),
        again("{% set n.l = [none, none] | map('default', n.l, true) | list %}", "{{ n.l }}"),
        again("{% set n.s = n.s ~ n.s %}", "{{ n.s }}"),
        again("{% set n.s = n.s.join([n.s, n.s, n.s]) %}", "{{ n.s }}"),
        again("{% set n.s = n.s.replace('x', 'xx') %}", "{{ n.s }}"),
        again("{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}", "{{ n.s }}"),
        again("{% set n.s = '%s%s' | format(n.s, n.s) %}", "{{ n.s }}"),
        "{% set l = [1] %}".to_owned() + &"{% set l = l + l %}".repeat(40) + "{{ l }}",
        "{% set l = [1] %}".to_owned() + &"{% set l = [l, l] %}".repeat(40) + "{{ l ~ '' }}",
    ]);
    for then in [
        "{{ n.l == n.m }}",
        "{{ n.l < n.m }}",
        "{{ n.l is eq n.m }}",
        "{{ n.l in [n.m] }}",
        "{{ [n.l].count(n.m) }}",
        "{{ [n.l, n.m] | unique }}",
        "{{ [n.l, n.m] | sort }}",
        "{{ {n.l: 1} }}",
        "{{ {}[n.l] }}",
        "{{ {}.get(n.l) }}",
        "{{ n.l ~ 'x' }}",
        "{{ n.l | upper }}",
        "{{ [n.l] | map('upper') | list }}",
        "{{ [n.l] | select('eq', n.m) | list }}",
        "{{ n.l | string }}",
        "{{ n.l | tojson }}",
        "{{ n.l | pprint }}",
        "{{ '%s' | format(n.l) }}",
        "{{ n.l | escape }}",
        "{{ n.l | safe }}",
        "{{ n.l | sum(start=[]) }}",
        "{{ raise_exception(n.l) }}",
        "{{ n.l + 1 }}",
        "{{ n.l | int }}",
        "{{ 'x'.join([n.l]) }}",
        "{{ 'x'.startswith(n.l) }}",
    ] {
        // What a single statement does with a value that has been paid for is worth an error only if it costs too much.
        sources.push(again(in_itself, then));
    }
    sources.extend(over_shared_texts());
    for (open, close) in [
        ("(", ")"),
        ("[", "]"),
        ("{'a': ", "}"),
        ("not ", ""),
        ("-", ""),
        ("1 if x else ", ""),
        ("1 + ", ""),
        ("", "|e"),
        ("", ".a"),
    ] {
        for count in [1_200, 100_000] {
            let expression = open.repeat(count) + "x" + &close.repeat(count);
            sources.push(format!("{{{{ {expression} }}}}{{{{ 1 / 0 }}}}"));
        }
    }
    sources.push("{% if true %}".repeat(5000) + &"{% endif %}".repeat(5000));
    sources.push("{% if x %}".to_owned() + &"{% elif x %}".repeat(50_000) + "{% endif %}{{ 1 / 0 }}");
    sources.push("{% if x %}".to_owned() + &"{% elif x %}".repeat(490) + "{% endif %}{{ 1 / 0 }}");
    sources.push("x".repeat(2 << 20));
    sources
}

/// Few values, which share texts that are long.
fn over_shared_texts() -> Vec<String> {
    let mut sources = vec!["{% set x = ['a' * 100000] * 100000 %}{{ x | join | length }}".to_owned()];
    for then in [
        "{{ x }}",
        "{{ x | join | length }}",
        "{{ x | replace('a', 'b') | length }}",
        "{{ raise_exception(x) }}",
        "{{ x | upper | length }}",
        "{{ x | title | length }}",
        "{{ x | tojson | length }}",
        "{{ {'a': x} | tojson | length }}",
        "{{ {'a': x} | length }}{{ {'a': x} ~ '' }}",
        "{{ x | string | length }}",
        "{{ (x ~ '') | length }}",
        "{{ ('%s' | format(x)) | length }}",
        "{{ ('%s' % (x,)) | length }}",
        "{{ ['%s'] | map('format', x) | list | length }}",
        "{{ '{}'.format(x) | length }}",
        "{{ ''.join(x) | length }}",
        "{{ x | indent | length }}",
        "{{ x | sum(start='') | length }}",
        "{{ x | trim | length }}",
        "{{ x | urlencode | length }}",
        "{{ x | escape | length }}",
        "{{ x | forceescape | length }}",
        "{{ x | pprint | length }}",
        "{{ x | map('join') | list | length }}",
        "{{ x | map('upper') | list | length }}",
        "{{ x | map('list') | list | length }}",
        "{{ x | map('urlencode') | list | length }}",
        "{{ [x] | map('upper') | list | length }}",
        "{{ [x] | map('join') | list | length }}",
        "{{ [x] | map('string') | list | length }}",
        "{{ [x] | map('tojson') | list | length }}",
        "{{ x | sort | length }}{{ x | sort | length }}",
        "{{ x | unique | list }}",
        "{{ x | max }}",
        "{{ x | center(10) | length }}",
        "{{ x | truncate(10) | length }}",
        "{{ x | int }}{{ x | join }}",
        "{% for i in range(1000) %}{% if x == ['a' * 100000] * 20000 %}{% endif %}{% endfor %}",
        "{% for i in range(1000) %}{% if ('a' * 99999 ~ 'b') in x %}{% endif %}{% endfor %}",
        "{% for i in range(1000) %}{% if x.count('a' * 99999 ~ 'b') %}{% endif %}{% endfor %}",
        "{% for i in range(1000) %}{% set y = x | select('upper') | list %}{% endfor %}",
        "{% for i in range(1000) %}{% set y = x | select('in', 'a' * 100001) | list %}{% endfor %}",
        "{% for i in range(1000) %}{% set y = x | batch(3) | map('join') | list %}{% endfor %}",
        "{% for i in range(1000) %}{% set y = x | slice(3) | map('join') | list %}{% endfor %}",
        "{% for i in range(1000) %}{% set y = x | map('length') | list %}{% endfor %}",
        "{% for y in x %}{{ y }}{% endfor %}",
        "{% for y in x %}{% set z = y | upper %}{% endfor %}",
        "{% for y in x %}{% set z = {y: 1} %}{% endfor %}",
        "{% for y in x %}{% if y == 'a' * 100000 %}{% endif %}{% endfor %}",
        "{% for y in x %}{% set z = y.split('a') %}{% endfor %}",
        "{% for y in x %}{% set z = y | list %}{% endfor %}",
        "{% for y in x %}{% if 'b' in y %}{% endif %}{% endfor %}",
    ] {
        sources.push(format!("{{% set x = ['a' * 100000] * 20000 %}}{then}"));
        // As many as can be kept, so that it is what comes after that costs too much.
        sources.push(format!("{{% set x = ['a' * 100000] * 2000 %}}{}", then.replace("20000", "2000")));
    }
    for then in [
        "join(attribute='k') | length",
        "map(attribute='k') | join | length",
        "map(attribute='k') | map('upper') | list | length",
        "groupby('k') | list | string | length",
        "groupby('k') | map(attribute='list') | map('string') | list | length",
        "sort(attribute='k') | tojson | length",
        "selectattr('k', 'in', ['a' * 100000]) | list | string | length",
        "map('dictsort') | list | string | length",
        "map('urlencode') | list | length",
        "map('items') | map('list') | list | string | length",
    ] {
        sources.push(format!("{{{{ ([{{'k': 'a' * 100000}}] * 20000) | {then} }}}}"));
        sources.push(format!("{{{{ ([{{'k': 'a' * 100000}}] * 2000) | {then} }}}}"));
    }
    let often = |body: &str| format!("{{% set s = 'é' * 400000 %}}{{% for i in range(99999) %}}{body}{{% endfor %}}");
    sources.extend([
        "{{ (('{0}' * 20000).format('a' * 100000)) | length }}".to_owned(),
        "{{ (('{a}' * 20000).format(a='a' * 100000)) | length }}".to_owned(),
        "{{ (('%(a)s' * 20000) | format(a='a' * 100000)) | length }}".to_owned(),
        "{% set f = '%(a)s' * 20000 %}{{ (f % {'a': 'a' * 100000}) | length }}".to_owned(),
        "{{ ['%(a)s' * 20000] | map('format', a='a' * 100000) | list | length }}".to_owned(),
        "{{ ('{:9999}' * 100000).format(*range(100000)) | length }}".to_owned(),
        "{{ ('{0:9999}' * 100000).format(1) | length }}".to_owned(),
        "{{ ('%(a)9999d' * 100000) | format(a=1) | length }}".to_owned(),
        "{{ ([1] * 20000) | join('a' * 100000) | length }}".to_owned(),
        "{{ ('a' * 100000).join(['b'] * 20000) | length }}".to_owned(),
        "{{ ([1] * 20000) | tojson(separators=('a' * 100000, ':')) | length }}".to_owned(),
        "{{ ([1] * 20000) | tojson(indent='a' * 100000) | length }}".to_owned(),
        "{{ 'x'.ljust(9999, 'a' * 100000) | length }}".to_owned(),
        "{{ 'x'.zfill(9999, 'a' * 100000) | length }}".to_owned(),
        "{{ ('\t' * 100000).expandtabs(100000) | length }}".to_owned(),
        "{{ (['a'] * 400000) | sum(start='') | length }}".to_owned(),
        "{{ ([(1,)] * 400000) | sum(start=()) | length }}".to_owned(),
        "{{ ([[1]] * 400000) | sum(start=[]) | length }}".to_owned(),
        "{% set s = 'a' * 20000000 %}{{ s.split('a') | length }}".to_owned(),
        "{% set s = ' ' * 20000000 %}{{ s.rsplit(' ') | length }}".to_owned(),
        "{% set s = 'a ' * 10000000 %}{{ s.split() | length }}".to_owned(),
        "{% set s = '\n' * 20000000 %}{{ s.splitlines() | length }}".to_owned(),
        "{% set s = '\n' * 20000000 %}{{ s | indent | length }}".to_owned(),
        "{% set s = '\n' * 1000 %}{{ s | indent('a' * 100000) | length }}".to_owned(),
        "{% set s = '\n' * 20000000 %}{{ s | lines | list | length }}".to_owned(),
        "{% set s = 'a ' * 10000000 %}{{ s | split | list | length }}".to_owned(),
        "{% set s = 'a' * 20000000 %}{{ s | list | length }}".to_owned(),
        "{% set s = 'a' * 20000000 %}{% for c in s %}{% endfor %}".to_owned(),
        "{% set s = 'a' * 20000000 %}{{ s | sort | length }}".to_owned(),
        "{% set s = 'a' * 20000000 %}{{ s | urlencode | length }}{{ s | urlencode | length }}".to_owned(),
        "{% set s = 'é' * 10000000 %}{{ s.swapcase() | length }}{{ s.casefold() | length }}".to_owned(),
        "{% set s = 'a' * 9000 %}{{ s | replace('a', s) | length }}".to_owned(),
        "{% set s = 'a' * 9000 %}{{ s.replace('a', s) | length }}".to_owned(),
        "{% set s = 'a' * 9000 %}{{ s.replace('', s) | length }}".to_owned(),
        "{{ [1].index('a' * 10000000) }}".to_owned(),
        "{{ 'b'.index('a' * 10000000) }}".to_owned(),
        "{% set s = '<' * 20000000 %}{{ s | escape | length }}{{ s | forceescape | length }}".to_owned(),
        "{% set s = '\x01' * 20000000 %}{{ [s] | tojson | length }}".to_owned(),
        "{% set s = '\x01' * 20000000 %}{{ s | pprint | length }}".to_owned(),
        often("{% set a = s[399998:399999] %}"),
        often("{% set a = s[::-1] %}"),
        often("{% set a = s[399998] %}"),
        often("{% set a = s[-1] %}"),
        often("{% set a = s[399990 + i] %}"),
        often("{% set a = s.find('x', 399998) %}"),
        often("{% for c in s %}{% break %}{% endfor %}"),
        often("{% set a = s | first %}"),
        often("{% set a = s | last %}"),
        often("{% set a = s | length %}"),
        often("{% if s == 'é' * 400000 %}{% endif %}"),
        often("{% if s < s %}{% endif %}"),
        often("{% if s is upper %}{% endif %}"),
        often("{% if s is eq s %}{% endif %}"),
        often("{% set a = {s: 1} %}"),
        often("{% set a = namespace(b=s) %}{% set a.b = a.b[1:] %}"),
    ]);
    sources
}

#[test]
fn hostile_templates_end_in_an_error() {
    let (mut slowest, mut largest) = (Duration::ZERO, 0);
    for source in hostile() {
        let before = peak_bytes();
        let start = Instant::now();
        let rendered = render_in_time(&source);
        let elapsed = start.elapsed();
        let shown: String = source.chars().take(150).collect();
        println!("{elapsed:?} {shown}: {:?}", rendered.as_ref().map(String::len));
        let error = rendered.expect_err(&shown).to_string();
        assert!(error.len() < 2000, "{shown}: an error of {} bytes", error.len());
        assert!(elapsed < MOST_TIME, "{shown}: {elapsed:?}");
        slowest = slowest.max(elapsed);
        if let (Some(_), Some(peak)) = (before, peak_bytes()) {
            assert!(peak < MOST_BYTES, "{shown}: {peak} bytes");
            largest = largest.max(peak);
        }
    }
    println!("slowest {slowest:?}, at most {} MiB resident", largest >> 20);
}

#[test]
fn values_may_be_nested_so_deep() {
    let mut deep = json!("x");
    for _ in 0..120 {
        deep = json!([deep]);
    }
    let rendered = render("{{ messages }}", json!([{"role": "user", "content": deep}]));
    assert!(matches!(rendered, Err(ChatError::Input(_))));
}

/// Writing a template out again changes nothing about it.
#[test]
fn bounds_do_not_show() {
    let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": ["b", {"c": [1, 2.5]}]}]);
    for (source, want) in [
        ("{% set a, (b, c) = 1, (2, 3) %}{{ a }}{{ b }}{{ c }}", "123"),
        ("{% set (a,) = [7] %}{{ a }}", "7"),
        ("{% for (a, b), c in [((1, 2), 3)] %}{{ a }}{{ b }}{{ c }}{% else %}-{% endfor %}", "123"),
        ("{% for a in [1, 2, 3] if a != 2 recursive %}{{ loop.index }}{{ a }} {% else %}none{% endfor %}", "11 23 "),
        ("{% with a = 1, (b, c) = (2, 3) %}{{ a + b * c }}{% endwith %}", "7"),
        ("{% macro m(a, b=[1, 2], c='\"\\\\') %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(0) }}", "0[1, 2]\"\\"),
        ("{% macro m(x) %}<{{ caller(x + [2]) }}>{% endmacro %}{% call(y) m([1]) %}{{ y }}{% endcall %}", "<[1, 2]>"),
        ("{% set x | upper | replace('A', 'b') %}a{% endset %}{{ x }}", "b"),
        ("{% filter upper | replace('A', 'c') %}a{% endfilter %}", "c"),
        ("{% if 0 %}a{% elif 1 < 2 < 3 %}b{% else %}c{% endif %}", "b"),
        ("{{ -2 ** 2 }} {{ (-2) ** 2 }} {{ 2 - 3 - 4 }} {{ 2 - (3 - 4) }} {{ 7 // 2 % 2 }}", "4 4 -5 3 1"),
        ("{{ not 1 == 2 }} {{ (not 1) == 2 }} {{ 1 not in [2] }} {{ 1 is not none }}", "True False True True"),
        ("{{ 'a' if 0 else 'b' if 0 else 'c' }}", "c"),
        (
            "{{ 1e300 }} {{ 0.1 }} {{ 1.0 }} {{ 1.5e-7 }} {{ 123456789012345678901 }}",
            "1e+300 0.1 1.0 1.5e-07 123456789012345678901",
        ),
        ("{{ 'a' 'b' ~ 1 ~ [2] }}", "ab1[2]"),
        (
            "{{ [1, 2, 3][1:] }}{{ [1, 2, 3][::-1] }}{{ 'abc'[-1] }}{{ (1,) }}{{ () }}{{ {} }}",
            "[2, 3][3, 2, 1]c(1,)(){}",
        ),
        ("{{ {'a': {'b': 1}, 2: 3}['a'].b }}{{ {'a': 1}.get('b', 4) }}{{ {'a': 1}.items() | list }}", "14[('a', 1)]"),
        (
            "{% set ns = namespace(l=[], d={'x': 1}) %}{% for m in messages %}{% set ns.l = ns.l + [m.role] %}{% endfor %}{{ ns.l }}{{ ns.d.x }}",
            "['user', 'assistant']1",
        ),
        (
            "{{ messages[1:] == messages[1:] }}{{ messages[0] in messages }}{{ messages.index(messages[1]) }}",
            "TrueTrue1",
        ),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}", "['a']"),
        ("{{ messages | tojson(indent=1) | length }}", "145"),
        ("{{ '{{' }}{% raw %}{{ {% }}{% endraw %}{# gone #}{{ '}}' }}", "{{{{ {% }}}}"),
        ("a{% if 1 -%}   b   {%- endif %}\nc\n", "abc"),
        ("  {% set x = 1 %}\n  {{ x }}\n\n", "  1\n"),
        ("{ {{ 1 }} }{{ '\\n\\t\\u00e9\\'' }}", "{ 1 }\n\té'"),
        (
            "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "02",
        ),
        ("{% block a %}x{% endblock %}{{ self.a() }}{% autoescape true %}{{ '<' }}{% endautoescape %}", "xx<"),
        ("{% set f = cycler('a', 'b') %}{{ f.next() }}{{ f.next() }}{{ f.next() }}", "aba"),
        ("{{ dict(a=1, **{'b': 2}) }}{{ [1, 2] | sum }}{{ '%s-%s' | format(*[1, 2]) }}", "{'a': 1, 'b': 2}31-2"),
        ("{{ [3, 1, 2] | sort(reverse=true) | join(', ') }}", "3, 2, 1"),
        ("{{ loop is defined }}{{ 4 is divisibleby 2 }}{{ 'a' is in ['a'] }}{{ x is undefined }}", "FalseTrueTrueTrue"),
    ] {
        assert_eq!(
            render(source, messages.clone()).unwrap_or_else(|error| format!("{source}: {error}")),
            want,
            "{source}"
        );
    }
}

/// Long is not deep.
#[test]
fn chains_may_be_long() {
    let chains = [
        ("'a'".to_owned() + &" + 'a'".repeat(400), "a".repeat(401)),
        ("1".to_owned() + &" ~ 1".repeat(400), "1".repeat(401)),
        ("x".to_owned() + &" or x".repeat(400) + " or 5", "5".to_owned()),
        ("'a'".to_owned() + &" | upper | default('b') | sort | first".repeat(60), "A".to_owned()),
        ("1 if x else ".repeat(400) + "2", "2".to_owned()),
        ("[1]".to_owned() + &" + [1]".repeat(200) + " == [1]", "False".to_owned()),
    ];
    for (expression, want) in chains {
        let source = format!("{{{{ {expression} }}}}");
        assert_eq!(render(&source, json!([])).unwrap_or_else(|error| error.to_string()), want, "{expression}");
    }
    let branches = "{% if x %}".to_owned() + &"{% elif x %}".repeat(400) + "{% else %}b{% endif %}";
    assert_eq!(render(&branches, json!([])).unwrap(), "b");
}

#[test]
fn errors_name_their_line() {
    for source in
        ["a\n{% if 1 %}\n\n{% set x = 1 / 0 %}{% endif %}", "\n\n{#\n#}{{ 1 / 0 }}", "{% set a = 1 %}\n\n\n{{ 1 / 0 }}"]
    {
        let error = render(source, json!([])).unwrap_err().to_string();
        assert!(error.contains("line 4"), "{source:?}: {error}");
    }
}

#[test]
fn long_conversations_are_rendered() {
    let message =
        json!({"role": "user", "content": "word ".repeat(2000), "tool_calls": [{"name": "f", "arguments": {"a": 1}}]});
    let source = "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}\
        {% if m in messages[loop.index0:loop.index] %}{{ m.content | trim }}{{ (messages | last).role }}{% endif %}{% endfor %}";
    assert!(render(source, Value::Array(vec![message; 500])).unwrap().len() > 4_000_000);
    let short = json!({"role": "user", "content": "word"});
    assert_eq!(render(source, Value::Array(vec![short; 1500])).unwrap().len(), 8 * 1500);
}
