//! What Jinja and Python make of small templates. The values are jinja2's.

use octavo::stages::tokenize::{ChatError, ChatTemplate, LocalTime, RenderInput};
use serde_json::json;

const NOW: LocalTime = LocalTime { year: 2025, month: 3, day: 4, hour: 5, minute: 6, second: 7 };

fn render(source: &str) -> Result<String, ChatError> {
    let input = RenderInput::new(json!([{"role": "user", "content": "hi"}]), NOW);
    ChatTemplate::compile(source, "", "").and_then(|template| template.render(&input))
}

fn check(cases: &[(&str, &str)]) {
    let differs = |(source, want): &(&str, &str)| {
        let found = render(source).unwrap_or_else(|error| error.to_string());
        (found != *want).then(|| format!("{source}\n   found  {found:?}\n   wanted {want:?}"))
    };
    let differences: Vec<String> = cases.iter().filter_map(differs).collect();
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[test]
fn items_and_attributes() {
    check(&[
        ("{{ 'abc'[1:] }}{{ 'aé'[-1] }}{{ 'abc'[5] is undefined }}{% set i = 1 %}{{ 'abc'[i] }}", "bcéTrueb"),
        ("{{ [1, 2][-1] }}{{ [1][5] is undefined }}{{ {'a': 1}['b'] is undefined }}", "2TrueTrue"),
        ("{{ [1, 2, 3][1.0] is undefined }}{{ {1: 2}[1.0] }}{{ {(1, 2): 3}[(1, 2)] }}", "True23"),
        ("{% set k = 'role' %}{{ messages[0][k] }}{{ messages[-1]['ro' ~ 'le'] }}", "useruser"),
        ("{{ 'abcde'[::-2] }}{{ 'aéb'[1:] }}{{ 'abc'[-2:9] }}{{ 'abc'[2:0:-1] }}{{ 'abc'[2:1] }}", "ecaébbccb"),
        (
            "{{ [1, 2, 3][::-1] }}{{ (1, 2, 3)[1:] }}{{ range(9)[2:7:2] | list }}{{ [][1:] }}",
            "[3, 2, 1](2, 3)[2, 4, 6][]",
        ),
        (
            "{% set d = {'a': [1, 2] | map('string')} %}{{ d.a | list }}{{ {'b': range(2)}['b'] | list }}",
            "['1', '2'][0, 1]",
        ),
        ("{{ messages[0] | attr('role') is undefined }}", "True"),
        ("{% set n = namespace(a=1) %}{{ n | attr('a') }}", "1"),
        ("{% for a in [1] %}{{ loop | attr('index') }}{% endfor %}", "1"),
        (
            "{% for g in [{'a': 1, 'b': 2}, {'a': 1, 'b': 3}] | groupby('a') %}{{ g.grouper }}{{ g.list }}{{ g[0] }}{% endfor %}",
            "1[{'a': 1, 'b': 2}, {'a': 1, 'b': 3}]1",
        ),
        (
            "{% for k, v in [{'a': 1}, {'a': 2}, {'a': 1}] | groupby('a') %}{{ k }}{{ v | length }} {% endfor %}",
            "12 21 ",
        ),
        ("{{ 'x' is sequence }}{{ {} is sequence }}{{ range(3) is sequence }}{{ u is sequence }}", "TrueTrueTrueTrue"),
        (
            "{{ [1] is sequence }}{{ ([1] + [2]) is sequence }}{{ 1 is sequence }}{{ none is sequence }}",
            "TrueTrueFalseFalse",
        ),
    ]);
}

#[test]
fn macros() {
    check(&[
        ("{% macro f(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}", "11"),
        ("{% macro f(a, b=a, c=b ~ 1) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(1) }}{{ f(1, 2) }}", "11111221"),
        (
            "{% macro f(a, b=a) %}[{{ caller(a, b) }}]{% endmacro %}{% call(x, y, z=x) f(1) %}{{ x }}{{ y }}{{ z }}{% endcall %}",
            "[111]",
        ),
        ("{% macro f(a, b=none, c=false) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(1, c=2) }}", "1None2"),
    ]);
}

#[test]
fn methods_of_texts() {
    check(&[
        ("{{ \"they're hello_w x1y\".title() }}", "They'Re Hello_W X1Y"),
        ("{{ 'Straße ς ı İ'.casefold() }}", "strasse σ ı i̇"),
        ("{{ 'a\\x0bb\\u2028c\\r\\nd\\x1ce\\x85'.splitlines() }}", "['a', 'b', 'c', 'd', 'e']"),
        ("{{ 'a\\r\\nb\\n\\nc'.splitlines(true) }}", "['a\\r\\n', 'b\\n', '\\n', 'c']"),
        (
            "{{ 'abc'.startswith('b', 1) }}{{ 'abc'.startswith('b', 2) }}{{ 'abc'.endswith('b', 0, 2) }}",
            "TrueFalseTrue",
        ),
        ("{{ 'abc'.startswith(('x', 'a')) }}{{ 'abc'.startswith(('x', 'b'), 1) }}", "TrueTrue"),
        ("{{ 'abcb'.find('b', 2) }}{{ 'abcb'.find('b', 2, 3) }}{{ 'abcb'.rfind('b', 0, -1) }}", "3-11"),
        ("{{ 'abcb'.count('b', 2) }}{{ 'abcb'.index('b', -1) }}{{ ''.find('', 1) }}{{ 'a'.find('', 1) }}", "13-11"),
        ("{{ 'Ab C1'.istitle() }}{{ 'ab'.istitle() }}{{ '12'.isdecimal() }}", "TrueFalseTrue"),
        ("{{ 'a_1'.isidentifier() }}{{ '1a'.isidentifier() }}{{ 'a\tb'.expandtabs(4) }}|", "TrueFalsea   b|"),
        ("{{ [1].copy() }}{{ {'a': 1}.copy() }}", "[1]{'a': 1}"),
        (
            r"{{ '\/' }}|{{ 'a\/b' }}|{{ '\\/' }}|{{ '\U0001F642' }}|{{ '\\U0001F642' }}|\/",
            r"\/|a\/b|\/|🙂|\U0001F642|\/",
        ),
    ]);
}

#[test]
fn texts_with_places() {
    check(&[
        ("{{ '%s' % 'a' }}{{ '%s-%s' % (1, 2) }}{{ '%(a)s' % {'a': 3} }}{{ '%d%%' % 5 }}", "a1-235%"),
        ("{{ 7 % 4 }}{% set n = 9 %}{{ n % 5 }}{{ n % n }}{{ 7.5 % 2 }}", "3401.5"),
        ("{% set f = '%s and %s' %}{{ f % ('a', n) }}|{{ '%5.1f|' % 2.25 }}{{ '%-4s|' % 'x' }}", "a and |  2.2|x   |"),
        ("{{ '%s %s' | format('x', [1]) }}{{ '%(a)s' | format(a=1) }}", "x [1]1"),
        (
            "{{ '{0} {1} {a}'.format(1, 2, a=3) }}{{ '{:>4}|{:.2f}'.format('x', 1.5) }}{{ '{{}}'.format() }}",
            "1 2 3   x|1.50{}",
        ),
    ]);
}

#[test]
fn filters() {
    check(&[
        ("{{ 'abc' | int }}{{ '' | int }} {{ '  12 ' | int }} {{ '1_000' | int }} {{ '_1' | int }}", "00 12 1000 0"),
        ("{{ '1__0' | int(5) }} {{ '0x1f' | int(base=16) }} {{ '3.7' | int }} {{ '1e3' | int }}", "5 31 3 1000"),
        ("{{ 'inf' | int }} {{ 'nan' | int }} {{ [] | int }} {{ none | int(3) }} {{ -3.9 | int }}", "0 0 0 3 -3"),
        ("{{ 'abc' | float }} {{ ' 1_0.5 ' | float }} {{ [] | float }} {{ '2' | float }}", "0.0 10.5 0.0 2.0"),
        ("{{ ['x', '3'] | map('int', default=7) | list }}", "[7, 3]"),
        ("{{ {'a b': 'c/d é'} | urlencode }}|{{ 'a b/c' | urlencode }}", "a+b=c%2Fd+%C3%A9|a%20b/c"),
        ("{{ [('a', 1), ('b', 'x y')] | urlencode }}", "a=1&b=x+y"),
        ("{{ {'b': 1, 'a': {'d': 1, 'c': (2,)}} | pprint }}", "{'a': {'c': (2,), 'd': 1}, 'b': 1}"),
        ("{{ '<a>' | forceescape }}", "&lt;a&gt;"),
        (
            "{{ 'a\n\nb' | indent }}|{{ 'a\nb\n' | indent('>>', true) }}|{{ '' | indent(2, true) }}|",
            "a\n\n    b|>>a\n>>b\n|  |",
        ),
        ("{{ 'a\n\nb' | indent(width=1, blank=true) }}|{{ 'a\nb' | indent(1, false, true) }}", "a\n \n b|a\n b"),
        (
            "{{ [[1], [2]] | sum(start=[]) }}{{ [1, 2] | sum(start=3) }}{{ [{'a': 1}, {'a': 2}] | sum('a') }}",
            "[1, 2]63",
        ),
        ("{{ [{'a': 1}, {'a': 2}] | sum(attribute='a', start=1) }}{{ [] | sum }}{{ [1.5] | sum }}", "401.5"),
        ("{{ [1, 'a', none] | join('-') }}{{ [] | join }}{{ 'abc' | join('.') }}", "1-a-Nonea.b.c"),
    ]);
}

#[test]
fn functions() {
    check(&[
        ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}", "aba"),
        ("{{ dict([('a', 1)], b=2) }}{{ dict({'a': 1}) }}{{ dict() }}", "{'a': 1, 'b': 2}{'a': 1}{}"),
        ("{% set n = namespace({'x': 1}, y=2) %}{{ n.x }}{{ n.y }}{% set n.x = 3 %}{{ n.x }}", "123"),
        (
            "{{ strftime_now('%U %W %k %l %P %r|%^a|%_d|%_H|%-d %0e %^B|%Q %-') }}",
            "09 09  5  5 am 05:06:07 AM|TUE| 4| 5|4 04 MARCH|%Q %-",
        ),
    ]);
}
