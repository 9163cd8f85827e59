//! Text, messages or token ids.

use octavo::engine::Prompt;
use octavo::stages::tokenize::{ContentFormat, LocalTime, RenderInput};
use pyo3::prelude::*;
use pyo3::types::PyString;
use serde_json::{Map, Value};

use crate::errors::invalid;
use crate::fields::token_ids;

/// Messages and what else goes into a chat template, as JSON texts; and what its clock shows, in seconds since 1970
/// with the zone's offset added.
#[pyclass(module = "octavo._octavo", frozen)]
pub struct Chat(pub RenderInput);

#[pymethods]
impl Chat {
    #[new]
    #[pyo3(signature = (messages_json, wall_clock_s, *, tools_json=None, documents_json=None, variables_json=None,
        add_generation_prompt=true, continue_final_message=false, chat_template=None, content_format="auto"))]
    #[expect(clippy::too_many_arguments, reason = "a chat template takes these")]
    fn new(
        py: Python<'_>,
        messages_json: &str,
        wall_clock_s: i64,
        tools_json: Option<&str>,
        documents_json: Option<&str>,
        variables_json: Option<&str>,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template: Option<&Bound<'_, PyString>>,
        content_format: &str,
    ) -> PyResult<Self> {
        let parse = |name: &str, json: &str| -> PyResult<Value> {
            let value = py.detach(|| serde_json::from_str(json));
            value.map_err(|error| invalid(format!("{name} must be made of JSON values: {error}")))
        };
        let variables = match variables_json.map(|json| parse("chat_template_kwargs", json)).transpose()? {
            Some(Value::Object(variables)) => variables,
            _ => Map::new(),
        };
        Ok(Self(RenderInput {
            messages: parse("messages", messages_json)?,
            tools: tools_json.map(|json| parse("tools", json)).transpose()?,
            documents: documents_json.map(|json| parse("documents", json)).transpose()?,
            add_generation_prompt,
            continue_final_message,
            variables,
            chat_template: chat_template.map(|template| text("chat_template", template)).transpose()?,
            content_format: content_format_named(content_format)?,
            now: LocalTime::from_unix(wall_clock_s),
        }))
    }
}

fn content_format_named(name: &str) -> PyResult<ContentFormat> {
    match name {
        "auto" => Ok(ContentFormat::Auto),
        "string" => Ok(ContentFormat::String),
        "openai" => Ok(ContentFormat::OpenAi),
        _ => Err(invalid(format!("chat_template_content_format must be 'auto', 'string' or 'openai', not {name:?}"))),
    }
}

/// A `str`, a [`Chat`], or an iterable of token ids.
pub fn prompt(prompt: &Bound<'_, PyAny>) -> PyResult<Prompt> {
    if let Ok(text) = prompt.cast::<PyString>() {
        return Ok(Prompt::Text(self::text("the prompt", text)?));
    }
    if let Ok(chat) = prompt.cast::<Chat>() {
        return Ok(Prompt::Chat(Box::new(chat.get().0.clone())));
    }
    token_ids("prompt", prompt).map(Prompt::Tokens).map_err(invalid)
}

/// A Python text, which must be valid Unicode: lone surrogates have no tokens.
pub fn text(name: &str, text: &Bound<'_, PyString>) -> PyResult<String> {
    text.to_cow().map(Into::into).map_err(|error| invalid(format!("{name} is not valid Unicode: {error}")))
}
