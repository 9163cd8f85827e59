//! Chat templates against transformers' Jinja.

use std::path::Path;

use octavo::stages::tokenize::{ChatError, ChatTemplate, LocalTime, RenderInput};
use serde_json::{Map, Value};

use crate::fixtures::{self, text};

const NOW: LocalTime = LocalTime { year: 2025, month: 3, day: 4, hour: 5, minute: 6, second: 7 };

fn input(inputs: &Value, conversation: &Value, tools: &Value) -> RenderInput {
    let mut input = RenderInput::new(inputs["conversations"][text(conversation)].clone(), NOW);
    input.tools = tools.as_str().map(|tools| inputs["tools"][tools].clone());
    input
}

fn check(name: &str, case: &Value, rendered: Result<String, ChatError>, failures: &mut Vec<String>) {
    match (case["expected"].as_str(), case["error_type"].as_str(), rendered) {
        (Some(want), _, Ok(got)) if got == want => {}
        (Some(want), _, got) => failures.push(format!("{name}: {got:?}\n   expected {want:?}")),
        (None, Some("raise_exception"), Err(ChatError::Raised(message))) if message == text(&case["error"]) => {}
        (None, Some("raise_exception"), got) => failures.push(format!("{name}: {got:?}, should refuse: {}", case["error"])),
        (None, _, Ok(_)) => println!("remark {name}: the reference fails ({})", case["error"]),
        (None, _, Err(_)) => {}
    }
}

fn check_micro(path: &Path, inputs: &Value, failures: &mut Vec<String>) {
    let micro = fixtures::json(path);
    for case in micro["cases"].as_array().unwrap() {
        let rendered = ChatTemplate::compile(text(&case["template"]), text(&micro["bos_token"]), text(&micro["eos_token"]))
            .and_then(|template| template.render(&input(inputs, &micro["conversation"], &micro["tools"])));
        check(&format!("micro {}", case["id"]), case, rendered, failures);
    }
}

#[test]
fn templates_render_as_in_transformers() {
    let mut failures = Vec::new();
    if let Some(chat) = fixtures::oracle().map(|oracle| oracle.join("chat")) {
        let inputs = fixtures::json(&chat.join("inputs.json"));
        check_micro(&chat.join("micro.json"), &inputs, &mut failures);
        for path in fixtures::listed(&chat.join("expected")) {
            let expected = fixtures::json(&path);
            let source = std::fs::read_to_string(chat.join(text(&expected["template"]))).unwrap();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            let template = match ChatTemplate::compile(&source, text(&expected["bos_token"]), text(&expected["eos_token"])) {
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
    let shown: Vec<_> = failures.iter().take(40).map(|failure| failure.chars().take(1200).collect::<String>()).collect();
    assert!(failures.is_empty(), "{} differences\n{}", failures.len(), shown.join("\n"));
}
