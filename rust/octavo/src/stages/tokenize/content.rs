//! Messages whose content is a list of parts, for templates that know lists and for those that do not.

use serde_json::Value;

use super::chat::ChatError;

/// How a template gets a content that is a list of parts, `[{"type": "text", "text": …}]`. (vLLM's names.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ContentFormat {
    /// As a list if the template walks through contents, as text otherwise. Parts that are no text are refused.
    #[default]
    Auto,
    /// As text: the parts joined with line ends.
    String,
    /// As it is, whatever the template makes of it. (What transformers does.)
    OpenAi,
}

/// Kinds of parts that this engine cannot show to a model, by a part of their name.
const MEDIA: [&str; 4] = ["image", "audio", "video", "file"];

impl ContentFormat {
    /// The messages as the template gets them. `None`: as they are.
    pub(super) fn apply(self, messages: &Value, walks_contents: bool) -> Result<Option<Value>, ChatError> {
        let parts = |message: &Value| message["content"].is_array();
        let list = messages.as_array().map_or(&[][..], Vec::as_slice);
        if self == Self::OpenAi || !list.iter().any(parts) {
            return Ok(None);
        }
        let joins = self == Self::String || !walks_contents;
        let mut messages = list.to_vec();
        for (n, message) in messages.iter_mut().enumerate() {
            let Value::Array(parts) = &message["content"] else { continue };
            let texts = parts.iter().enumerate().map(|(at, part)| text_of(part, n, at, joins));
            let texts = texts.collect::<Result<Vec<_>, _>>()?;
            if joins {
                message["content"] = Value::String(texts.join("\n"));
            }
        }
        Ok(Some(Value::Array(messages)))
    }
}

/// The text of a part. Where it stays a part, other kinds than text may be meant for the template; media are not.
fn text_of(part: &Value, message: usize, at: usize, must_be_text: bool) -> Result<&str, ChatError> {
    let kind = part["type"].as_str();
    match (part, kind) {
        (Value::String(text), _) => Ok(text),
        (Value::Object(members), None | Some("text")) if members.get("text").is_some_and(Value::is_string) => {
            Ok(part["text"].as_str().unwrap_or_default())
        }
        (Value::Object(_), Some(kind))
            if !must_be_text && kind != "text" && !MEDIA.iter().any(|media| kind.contains(media)) =>
        {
            Ok("")
        }
        _ => {
            let found = match kind {
                Some("text") => "has no `text`".to_owned(),
                Some(kind) => format!("is of type `{kind}`"),
                None => "has no `type`".to_owned(),
            };
            Err(ChatError::Input(format!(
                "messages[{message}].content[{at}] {found}; a part is {{\"type\": \"text\", \"text\": …}}"
            )))
        }
    }
}
