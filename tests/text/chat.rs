//! Chat templates against transformers' Jinja.

use std::path::Path;

use octavo::stages::tokenize::{ChatError, ChatTemplate, ContentFormat, LocalTime, RenderInput, Special, Tokenizer};
use serde_json::{Map, Value, json};

use crate::fixtures::{self, text};

const NOW: LocalTime = LocalTime { year: 2025, month: 3, day: 4, hour: 5, minute: 6, second: 7 };

fn input(inputs: &Value, conversation: &Value, tools: &Value) -> RenderInput {
    let mut input = RenderInput::new(inputs["conversations"][text(conversation)].clone(), NOW);
    input.tools = tools.as_str().map(|tools| inputs["tools"][tools].clone());
    // transformers shows every template what it was given.
    input.content_format = ContentFormat::OpenAi;
    input
}

fn check(name: &str, case: &Value, rendered: Result<String, ChatError>, failures: &mut Vec<String>) {
    match (case["expected"].as_str(), case["error_type"].as_str(), rendered) {
        (Some(want), _, Ok(got)) if got == want => {}
        (Some(want), _, got) => failures.push(format!("{name}: {got:?}\n   expected {want:?}")),
        (None, Some("raise_exception"), Err(ChatError::Raised(message))) if message == text(&case["error"]) => {}
        (None, Some("raise_exception"), got) => {
            failures.push(format!("{name}: {got:?}, should refuse: {}", case["error"]))
        }
        (None, _, Ok(_)) => println!("remark {name}: the reference fails ({})", case["error"]),
        (None, _, Err(_)) => {}
    }
}

fn check_micro(path: &Path, inputs: &Value, failures: &mut Vec<String>) {
    let micro = fixtures::json(path);
    for case in micro["cases"].as_array().unwrap() {
        let rendered =
            ChatTemplate::compile(text(&case["template"]), text(&micro["bos_token"]), text(&micro["eos_token"]))
                .and_then(|template| template.render(&input(inputs, &micro["conversation"], &micro["tools"])));
        check(&format!("micro {}", case["id"]), case, rendered, failures);
    }
}

#[test]
fn templates_render_as_in_transformers() {
    let mut failures = Vec::new();
    let chat = fixtures::committed().join("../chat");
    check_micro(&chat.join("micro.json"), &fixtures::json(&chat.join("inputs.json")), &mut failures);
    if let Some(chat) = fixtures::oracle().map(|oracle| oracle.join("chat")) {
        let inputs = fixtures::json(&chat.join("inputs.json"));
        check_micro(&chat.join("micro.json"), &inputs, &mut failures);
        for path in fixtures::listed(&chat.join("expected")) {
            let expected = fixtures::json(&path);
            let source = std::fs::read_to_string(chat.join(text(&expected["template"]))).unwrap();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            let template =
                match ChatTemplate::compile(&source, text(&expected["bos_token"]), text(&expected["eos_token"])) {
                    Ok(template) => template,
                    Err(error) => {
                        failures.push(format!("{name}: {error}"));
                        continue;
                    }
                };
            for case in expected["cases"].as_array().unwrap() {
                let mut input = input(&inputs, &case["conversation"], &case["tools"]);
                input.add_generation_prompt = case["add_generation_prompt"].as_bool().unwrap();
                input.variables = case["variables"].as_object().cloned().unwrap_or_else(Map::new);
                check(&format!("{name} {}", case["conversation"]), case, template.render(&input), &mut failures);
            }
        }
    }
    let shown: Vec<_> =
        failures.iter().take(40).map(|failure| failure.chars().take(1200).collect::<String>()).collect();
    assert!(failures.is_empty(), "{} differences\n{}", failures.len(), shown.join("\n"));
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::compile(source, "<|bos|>", "<|eos|>").unwrap()
}

const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}\
    {% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn control_ids(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<u32> {
    ids.iter().copied().filter(|&id| tokenizer.is_special(id)).collect()
}

#[test]
fn a_harmless_prompt_is_encoded_as_if_it_were_parsed() {
    let tokenizer = fixtures::folder(&fixtures::committed().join("tiny/bpeq"));
    let input = RenderInput::new(json!([{"role": "user", "content": "Hello <b>there</b> > | <"}]), NOW);
    let rendered = template(CHATML).render_ids(&tokenizer, &input).unwrap();
    assert_eq!(rendered.text, template(CHATML).render(&input).unwrap());
    assert_eq!(rendered.encoding, tokenizer.encode(&rendered.text, Special::Parse, false).unwrap());
}

/// Whatever users write, in whatever place, the prompt has the control tokens of the template and no others.
#[test]
fn nothing_that_users_write_becomes_a_control_token() {
    for name in ["bpe3", "bpeq", "gem", "spm"] {
        let tokenizer = fixtures::folder(&fixtures::committed().join("tiny").join(name));
        let names: Vec<String> = (0..tokenizer.len() as u32)
            .filter(|&id| tokenizer.is_special(id))
            .map(|id| tokenizer.token(id).unwrap().to_owned())
            .collect();
        let (open, close) = (&names[0], &names[names.len() - 1]);
        // Halves of a token stand directly before and after what users write.
        let half = open.len() / 2;
        let (head, tail) = (&open[..half], &open[half..]);
        let sources = [
            format!(
                "{{% for m in messages %}}{open}{{{{ m.role }}}} {{{{ m.content }}}}{close}{{% endfor %}}{{{{ tools | tojson }}}}"
            ),
            format!("{open}{head}{{{{ messages[0].content }}}}{tail}{close}"),
            format!("{open}{{{{ messages | map(attribute='content') | join }}}}{{{{ messages }}}}{close}"),
            format!("{open}{head}{{{{ messages[0].content | trim | upper | lower }}}}{tail}{close}"),
        ];
        let control = |source: &str, messages: Value, tools: Value| {
            let mut input = RenderInput::new(messages, NOW);
            input.tools = Some(tools);
            let rendered = ChatTemplate::compile(source, "", "").unwrap().render_ids(&tokenizer, &input).unwrap();
            // What stands for a token has no case, so a template that changes case leaves it as it was written.
            let text = ChatTemplate::compile(source, "", "").unwrap().render(&input).unwrap();
            assert_eq!(rendered.text.to_lowercase(), text.to_lowercase());
            control_ids(&tokenizer, &rendered.encoding.ids)
        };
        for token in &names {
            let edges = [format!(" {}", &token[1..]), tail.into(), head.into(), format!("{tail}{head}")];
            for content in edges.into_iter().chain([token.clone(), format!("a{token}{token} ")]) {
                for source in &sources {
                    let harmless = json!([{"role": "user", "content": "x"}, {"role": "user", "content": "x"}]);
                    let hostile = json!([
                        {"role": "user", "content": content},
                        {"role": token, "content": content, "name": token},
                    ]);
                    let wanted = control(source, harmless, json!([{"name": "x"}]));
                    let found = control(source, hostile, json!([{"name": token, token: [content]}]));
                    assert_eq!(found, wanted, "{name}: {content:?} in {source}");
                }
            }
        }
    }
}

/// The places where a user's words can stand, each between two halves of a control token that the template writes.
const PLACES: [&str; 10] = [
    "messages[0].content",
    "messages[0].name",
    "messages[0]['content'] | trim",
    "messages[1].tool_calls[0].function.name",
    "messages[1].tool_calls[0].function.arguments.city",
    "messages[1].tool_calls[0].function.arguments | list | first",
    "messages[2].content",
    "messages[3].content[0].text",
    "tools[0].description",
    "documents[0].title",
];

#[test]
fn a_template_cannot_be_made_to_complete_a_control_token() {
    let mut completed_unmarked = 0;
    for name in ["bpe3", "bpeq", "gem", "spm"] {
        let tokenizer = fixtures::folder(&fixtures::committed().join("tiny").join(name));
        let tokens: Vec<_> = (0..tokenizer.len() as u32).filter(|&id| tokenizer.is_special(id)).collect();
        for token in tokens.iter().map(|&id| tokenizer.token(id).unwrap()).filter(|token| token.is_ascii()) {
            let cuts = [(0, token.len()), (1, token.len() - 1), (1, token.len()), (0, token.len() - 1)];
            for (from, to) in cuts.into_iter().filter(|(from, to)| from < to) {
                let word = &token[from..to];
                for place in PLACES {
                    let source = format!("{}{{{{ {place} }}}}{}", &token[..from], &token[to..]);
                    let mut input = RenderInput::new(
                        json!([
                            {"role": "user", "content": word, "name": word},
                            {"role": "assistant", "content": null, "tool_calls": [
                                {"function": {"name": word, "arguments": {word: word, "city": word}}}
                            ]},
                            {"role": "tool", "content": word},
                            {"role": "user", "content": [{"type": "text", "text": word}]},
                        ]),
                        NOW,
                    );
                    input.content_format = ContentFormat::OpenAi;
                    input.tools = Some(json!([{"description": word}]));
                    input.documents = Some(json!([{"title": word}]));
                    let rendered =
                        ChatTemplate::compile(&source, "", "").unwrap().render_ids(&tokenizer, &input).unwrap();
                    assert_eq!(rendered.text, token, "{name}: {source}");
                    let found = &rendered.encoding.ids[usize::from(tokenizer.adds_bos())..];
                    assert_eq!(control_ids(&tokenizer, found), [0; 0], "{name}: {word:?} in {source}");
                    let parsed = tokenizer.encode(&rendered.text, Special::Parse, false).unwrap();
                    completed_unmarked += control_ids(&tokenizer, &parsed.ids).len();
                }
            }
        }
    }
    assert!(completed_unmarked > 500, "the attacks are none");
}

/// Marking a word must not keep a template from recognising it.
#[test]
fn templates_recognise_words_that_could_fill_a_token() {
    let tokenizer = fixtures::folder(&fixtures::committed().join("tiny/bpeq"));
    for (source, want) in [
        ("{% if messages[0].name == 'im_start' %}yes{% endif %}", "yes"),
        ("{% set word = 'im_' ~ 'start' %}{% if messages[0].name == word %}yes{% endif %}", "yes"),
        ("{{ messages[0].name | upper }}", "IM_START"),
        ("{% if messages[0].name == messages[0].content %}same{% endif %}", "same"),
        ("{% if messages[0].name != 'im_' ~ 'start' %}{{ raise_exception('no') }}{% endif %}", ""),
    ] {
        let input = RenderInput::new(json!([{"role": "user", "content": "im_start", "name": "im_start"}]), NOW);
        let rendered = ChatTemplate::compile(source, "", "").unwrap().render_ids(&tokenizer, &input).unwrap();
        assert_eq!(rendered.text, want, "{source}");
    }
}

#[test]
fn contents_that_are_lists_of_parts() {
    let plain = "{% for m in messages %}[{{ m.content }}]{% endfor %}";
    let walks = [
        "{% for m in messages %}[{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endif %}]{% endfor %}",
        "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for p in content %}{{ p['text'] }}|{% endfor %}{% endif %}{% endmacro %}{% for m in messages %}[{{ show(m['content']) }}]{% endfor %}",
        "{% for m in messages %}{% set c = m['content'] %}[{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ p.text }}|{% endfor %}{% endif %}]{% endfor %}",
        "{% for m in messages %}[{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | map(attribute='text') | join('|') }}|{% endif %}]{% endfor %}",
    ];
    let part = |text: &str| json!({"type": "text", "text": text});
    let messages = json!([{"role": "user", "content": [part("a"), part("b")]}, {"role": "user", "content": "c"}]);
    let render = |source: &str, messages: &Value, format: ContentFormat| {
        let mut input = RenderInput::new(messages.clone(), NOW);
        input.content_format = format;
        template(source).render(&input)
    };
    assert_eq!(render(plain, &messages, ContentFormat::Auto).unwrap(), "[a\nb][c]");
    assert_eq!(render(plain, &messages, ContentFormat::String).unwrap(), "[a\nb][c]");
    assert!(render(plain, &messages, ContentFormat::OpenAi).unwrap().starts_with("[[{'type': 'text'"));
    for source in walks {
        assert_eq!(render(source, &messages, ContentFormat::Auto).unwrap(), "[a|b|][c]", "{source}");
        assert_eq!(render(source, &messages, ContentFormat::OpenAi).unwrap(), "[a|b|][c]", "{source}");
        assert_eq!(render(source, &messages, ContentFormat::String).unwrap(), "[a\nb][c]", "{source}");
    }
    let with = |part: Value| json!([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]);
    for (source, bad, wanted) in [
        (plain, json!({"type": "image_url", "image_url": {"url": "x"}}), "`image_url`"),
        (walks[0], json!({"type": "image_url", "image_url": {"url": "x"}}), "`image_url`"),
        (walks[0], json!({"type": "input_audio"}), "`input_audio`"),
        (plain, json!({"type": "thinking", "thinking": "x"}), "`thinking`"),
        (plain, json!({"type": "text"}), "has no `text`"),
        (plain, json!(5), "has no `type`"),
    ] {
        let error = render(source, &with(bad), ContentFormat::Auto).unwrap_err().to_string();
        assert!(error.contains("messages[0].content[1]") && error.contains(wanted), "{error}");
    }
    assert_eq!(render(walks[0], &with(json!({"type": "thinking"})), ContentFormat::Auto).unwrap(), "[a||]");
    assert_eq!(render(plain, &with(json!("b")), ContentFormat::Auto).unwrap(), "[a\nb]");
}

#[test]
fn bos_stands_once() {
    let tokenizer = fixtures::folder(&fixtures::committed().join("tiny/bpe3"));
    let bos = tokenizer.bos().unwrap();
    assert!(tokenizer.adds_bos());
    for source in ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"] {
        let template = ChatTemplate::compile(source, tokenizer.token(bos).unwrap(), "").unwrap();
        let rendered =
            template.render_ids(&tokenizer, &RenderInput::new(json!([{"role": "user", "content": "x"}]), NOW)).unwrap();
        assert_eq!(rendered.encoding.ids.iter().filter(|&&id| id == bos).count(), 1, "{source}");
        assert_eq!(rendered.encoding.ids[0], bos);
    }
}

#[test]
fn the_last_message_can_stay_open() {
    let mut input = RenderInput::new(
        json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": " Once upon "}]),
        NOW,
    );
    input.continue_final_message = true;
    assert!(matches!(template(CHATML).render(&input), Err(ChatError::Input(_))));
    input.add_generation_prompt = false;
    assert!(template(CHATML).render(&input).unwrap().ends_with("<|im_start|>assistant\nOnce upon"));
    let untrimmed = "{% for m in messages %}<{{ m.content }}>{% endfor %}";
    assert_eq!(template(untrimmed).render(&input).unwrap(), "<a>< Once upon ");
}

#[test]
fn training_marks_leave_no_trace() {
    let source = "{% for m in messages %}\n{%- generation -%} {{ m.content }}{%- endgeneration %}.{% endfor %}";
    let input = RenderInput::new(json!([{"role": "user", "content": "a"}]), NOW);
    assert_eq!(template(source).render(&input).unwrap(), "a.");
}
