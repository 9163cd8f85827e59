//! Text, messages or token ids.

use octavo::engine::Prompt;
use octavo::stages::tokenize::{LocalTime, RenderInput};
use pyo3::prelude::*;
use pyo3::types::PyString;
use serde_json::Value;

use crate::errors::invalid;
use crate::fields::token_ids;

/// Messages and tools for a chat template, as JSON texts.
#[pyclass(module = "octavo._octavo", frozen)]
pub struct Chat(pub RenderInput);

#[pymethods]
impl Chat {
    #[new]
    #[pyo3(signature = (messages_json, tools_json, add_generation_prompt, wall_clock_s))]
    fn new(
        messages_json: &str,
        tools_json: Option<&str>,
        add_generation_prompt: bool,
        wall_clock_s: i64,
    ) -> PyResult<Self> {
        let parse = |name: &str, json: &str| -> PyResult<Value> {
            serde_json::from_str(json).map_err(|error| invalid(format!("{name} must be made of JSON values: {error}")))
        };
        let messages = parse("messages", messages_json)?;
        let tools = tools_json.map(|json| parse("tools", json)).transpose()?;
        let now = LocalTime::from_unix(wall_clock_s);
        Ok(Self(RenderInput { tools, add_generation_prompt, ..RenderInput::new(messages, now) }))
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
