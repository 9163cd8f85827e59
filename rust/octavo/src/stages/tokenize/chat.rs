//! Messages → prompt, by the Jinja template that a model brings along.
//!
//! Templates are not trusted: they run with fuel, with a recursion limit and with a limit on what they write, and reach
//! nothing but their arguments.

use std::fmt;
use std::io;
use std::ops::Range;

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, State, Value as Jinja};
use serde_json::{Map, Value};

use super::bounds;
use super::civil::LocalTime;
use super::content::ContentFormat;
use super::marker::Marker;
use super::python;
use super::tokenizer::{Encoding, Special, Tokenizer, TokenizerError};

/// What one rendering may cost: about one unit an instruction, and one for every 64 bytes it moves.
const FUEL: u64 = 500_000;
/// Fuel on top for what is rendered, so that long conversations are not refused: for every byte, and for every value (a
/// message has about five).
const FUEL_PER_BYTE: u64 = 2;
const FUEL_PER_VALUE: u64 = 500;
/// Nested macros and loops. Real templates need about 30; each level costs stack.
const MAX_RECURSION: usize = 200;
/// No model reads a prompt as long as this.
const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// Longer than any template in use by far.
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
    /// Whether it knows contents that are lists of parts.
    walks_contents: bool,
}

/// What is rendered.
#[derive(Clone, Debug)]
pub struct RenderInput {
    /// The conversation: a list of objects with `role` and `content`.
    pub messages: Value,
    /// JSON schemas of the functions the model may call.
    pub tools: Option<Value>,
    /// Documents the answer may draw on.
    pub documents: Option<Value>,
    /// End the prompt with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// End the prompt with the last message, still open, so that the model goes on with it.
    pub continue_final_message: bool,
    /// What else the template may ask for, `enable_thinking` say. These are the program's words, not a user's: special
    /// tokens in them are special.
    pub variables: Map<String, Value>,
    /// Another template than the model's own.
    pub chat_template: Option<String>,
    /// How the template gets contents that are lists of parts.
    pub content_format: ContentFormat,
    /// What `strftime_now` shows.
    pub now: LocalTime,
}

impl RenderInput {
    /// A conversation, to be answered.
    pub fn new(messages: Value, now: LocalTime) -> Self {
        Self {
            messages,
            tools: None,
            documents: None,
            add_generation_prompt: true,
            continue_final_message: false,
            variables: Map::new(),
            chat_template: None,
            content_format: ContentFormat::Auto,
            now,
        }
    }
}

/// A rendered prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// As a person would read it.
    pub text: String,
    /// As the model reads it.
    pub encoding: Encoding,
}

/// A chat template could not be compiled or rendered.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// It is not a template.
    #[error("the chat template does not compile: {0}")]
    Compile(String),
    /// The template itself refused the conversation, in these words.
    #[error("the chat template refuses: {0}")]
    Raised(String),
    /// It failed.
    #[error("the chat template failed: {0}")]
    Render(String),
    /// It did too much.
    #[error("the chat template went beyond its limits: {0}")]
    Limit(String),
    /// The input is no conversation.
    #[error("{0}")]
    Input(String),
    /// The prompt could not be tokenized.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

impl ChatTemplate {
    /// Compiles a template. `bos` and `eos` are the names of the tokens that it may write.
    pub fn compile(source: &str, bos: &str, eos: &str) -> Result<Self, ChatError> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(ChatError::Limit(format!("{} bytes of source, at most {MAX_SOURCE_BYTES}", source.len())));
        }
        let failed = |error: Error| ChatError::Compile(describe(&error));
        let mut environment = Environment::new();
        let jinja = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(failed)?;
        let plain = SyntaxConfig::builder().keep_trailing_newline(true).build().map_err(failed)?;
        environment.set_syntax(plain);
        environment.set_recursion_limit(MAX_RECURSION);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        python::add_to(&mut environment);
        environment.add_function("raise_exception", |state: &State, message: Jinja| -> Result<Jinja, Error> {
            let message = python::to_str(state, &message)?;
            Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
        });
        let jinja_source = with_python_escapes(&without_generation_blocks(source), &jinja);
        let bounded = bounds::add_to(&jinja_source, &jinja).map_err(failed)?;
        environment.add_template_owned("chat", bounded.source).map_err(failed)?;
        let walks_contents = bounded.walks_contents;
        Ok(Self { environment, source: source.to_owned(), bos: bos.to_owned(), eos: eos.to_owned(), walks_contents })
    }

    /// Compiles a template of the model whose tokenizer this is.
    pub fn of(tokenizer: &Tokenizer, source: &str) -> Result<Self, ChatError> {
        let name = |id: Option<u32>| id.and_then(|id| tokenizer.token(id)).unwrap_or_default();
        Self::compile(source, name(tokenizer.bos()), name(tokenizer.eos()))
    }

    /// The template's source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt as text.
    pub fn render(&self, input: &RenderInput) -> Result<String, ChatError> {
        check(input)?;
        let messages = input.content_format.apply(&input.messages, self.walks_contents)?;
        let messages = messages.as_ref().unwrap_or(&input.messages);
        self.render_values(messages, input.tools.as_ref(), input.documents.as_ref(), input)
    }

    /// The prompt as text and token ids. Nothing in messages, tools or documents becomes a control token, whatever is
    /// written there. BOS stands at the beginning once, if the tokenizer adds it.
    pub fn render_ids(&self, tokenizer: &Tokenizer, input: &RenderInput) -> Result<Rendered, ChatError> {
        check(input)?;
        let messages = input.content_format.apply(&input.messages, self.walks_contents)?;
        let messages = messages.as_ref().unwrap_or(&input.messages);
        let variables = Value::Object(input.variables.clone());
        let mut values = vec![messages, &variables];
        values.extend(&input.tools);
        values.extend(&input.documents);
        let marker = || Marker::new(&tokenizer.specials, &self.source, &values);
        let mut strict = marker().with_middles(&self.source);
        let mut rendered = self.render_marked(&mut strict, messages, input);
        let noticed = |rendered: &Result<(String, _), _>| match (rendered, self.render(input)) {
            (Ok((marked, _)), Ok(plain)) => *marked != plain,
            _ => true,
        };
        if strict.marked_middles() && noticed(&rendered) {
            rendered = self.render_marked(&mut marker(), messages, input);
        }
        let (text, literals) = rendered?;
        Ok(Rendered { encoding: encode(tokenizer, &text, &literals)?, text })
    }

    /// The prompt, and where in it a user's words are that look like control tokens.
    fn render_marked(
        &self,
        marker: &mut Marker,
        messages: &Value,
        input: &RenderInput,
    ) -> Result<(String, Vec<Range<usize>>), ChatError> {
        let messages = marker.mark(messages);
        let tools = input.tools.as_ref().map(|tools| marker.mark(tools));
        let documents = input.documents.as_ref().map(|documents| marker.mark(documents));
        let rendered = self.render_values(&messages, tools.as_ref(), documents.as_ref(), input)?;
        Ok(marker.restore(&rendered))
    }

    fn render_values(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        documents: Option<&Value>,
        input: &RenderInput,
    ) -> Result<String, ChatError> {
        let messages = with_reasoning(messages);
        let now = input.now;
        let mut context = vec![
            ("messages".to_owned(), python::from_json(&messages)),
            ("tools".to_owned(), tools.map_or(Jinja::from(()), python::from_json)),
            ("documents".to_owned(), documents.map_or(Jinja::from(()), python::from_json)),
            ("add_generation_prompt".to_owned(), Jinja::from(input.add_generation_prompt)),
            ("bos_token".to_owned(), Jinja::from(self.bos.as_str())),
            ("eos_token".to_owned(), Jinja::from(self.eos.as_str())),
            ("strftime_now".to_owned(), Jinja::from_function(move |format: &str| now.format(format))),
        ];
        context.extend(input.variables.iter().map(|(name, value)| (name.clone(), python::from_json(value))));
        let others = [tools, documents].into_iter().flatten().map(fuel_for).sum::<u64>();
        let text = self.run(Jinja::from_pairs(context), FUEL + fuel_for(&messages) + others)?;
        if input.continue_final_message { cut_after_final_message(text, &messages) } else { Ok(text) }
    }

    fn run(&self, context: Jinja, fuel: u64) -> Result<String, ChatError> {
        // A clone shares the compiled template; the fuel is this rendering's own.
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel));
        let mut output = Limited(Vec::new());
        environment
            .get_template("chat")
            .and_then(|template| template.render_captured_to(context, &mut output).map(|_| ()))
            .map_err(classify)?;
        String::from_utf8(output.0).map_err(|error| ChatError::Render(error.to_string()))
    }
}

fn encode(tokenizer: &Tokenizer, text: &str, literals: &[Range<usize>]) -> Result<Encoding, TokenizerError> {
    let mut encoding = Encoding::default();
    tokenizer.encode_with_literals(text, Special::Parse, literals, &mut encoding)?;
    if let Some(bos) = tokenizer.bos().filter(|_| tokenizer.adds_bos())
        && encoding.ids.first() != Some(&bos)
    {
        encoding.ids.insert(0, bos);
        encoding.offsets.insert(0, 0..0);
    }
    Ok(encoding)
}

fn check(input: &RenderInput) -> Result<(), ChatError> {
    let Some(messages) = input.messages.as_array() else {
        return Err(ChatError::Input("messages must be a list of objects with `role` and `content`".into()));
    };
    if let Some((n, found)) = messages.iter().enumerate().find(|(_, message)| !message.is_object()) {
        return Err(ChatError::Input(format!(
            "messages[{n}] must be an object with `role` and `content`, not {found}"
        )));
    }
    if input.continue_final_message && input.add_generation_prompt {
        return Err(ChatError::Input("continue_final_message and add_generation_prompt cannot both be true".into()));
    }
    let too_deep = |value: &Value| !fits(value, python::MAX_DEPTH);
    let values = [Some(&input.messages), input.tools.as_ref(), input.documents.as_ref()];
    if values.into_iter().flatten().chain(input.variables.values()).any(too_deep) {
        return Err(ChatError::Input(format!("values may be nested {} deep", python::MAX_DEPTH)));
    }
    Ok(())
}

fn fits(value: &Value, depth: usize) -> bool {
    match value {
        Value::Array(values) => depth > 0 && values.iter().all(|value| fits(value, depth - 1)),
        Value::Object(members) => depth > 0 && members.values().all(|value| fits(value, depth - 1)),
        _ => true,
    }
}

fn fuel_for(value: &Value) -> u64 {
    let inside = match value {
        Value::String(text) => FUEL_PER_BYTE * text.len() as u64,
        Value::Array(values) => values.iter().map(fuel_for).sum(),
        Value::Object(members) => members.values().map(fuel_for).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    };
    FUEL_PER_VALUE + inside
}

/// Templates ask for a message's reasoning under either of two names; both are there if one is.
fn with_reasoning(messages: &Value) -> Value {
    const NAMES: [&str; 2] = ["reasoning_content", "reasoning"];
    let mut messages = messages.clone();
    for message in messages.as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
        for (from, to) in [(NAMES[0], NAMES[1]), (NAMES[1], NAMES[0])] {
            if let Some(reasoning) = message.get(from).filter(|_| !message.contains_key(to)).cloned() {
                message.insert(to.to_owned(), reasoning);
            }
        }
    }
    messages
}

/// Cuts what a template writes after the last message.
fn cut_after_final_message(mut text: String, messages: &Value) -> Result<String, ChatError> {
    let content = messages.as_array().and_then(|messages| messages.last()).map(|message| &message["content"]);
    let last_part = |parts: &Vec<Value>| parts.iter().rev().find_map(|part| part["text"].as_str().map(str::to_owned));
    let content = match content {
        Some(Value::String(content)) => Some(content.clone()),
        Some(Value::Array(parts)) => last_part(parts),
        _ => None,
    };
    let content =
        content.ok_or_else(|| ChatError::Input("continue_final_message needs a last message with text".into()))?;
    let trimmed = content.trim();
    let Some(start) = text.rfind(trimmed) else {
        return Err(ChatError::Input(
            "the chat template does not write the last message as it is: it cannot be continued".into(),
        ));
    };
    // White space at its end is kept if the template kept it.
    let whole = content.trim_start();
    let len = if text[start..].starts_with(whole) { whole.len() } else { trimmed.len() };
    text.truncate(start + len);
    Ok(text)
}

/// `{% generation %}` marks what an assistant wrote, for training. To us it is a block like any other.
fn without_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(end) = tag.find("%}") else { break };
        let (inner, sign) = (&tag[2..end], |c: char| c == '-' || c == '+');
        let replacement = match inner.trim_matches(sign).trim() {
            "generation" => Some(" if true "),
            "endgeneration" => Some(" endif "),
            _ => None,
        };
        match replacement {
            Some(replacement) => {
                let lead = &inner[..inner.len() - inner.trim_start_matches(sign).len()];
                let trail = &inner[inner.trim_end_matches(sign).len()..];
                out.extend(["{%", lead, replacement, trail, "%}"]);
                rest = &tag[end + 2..];
            }
            None => {
                out.push_str("{%");
                rest = &tag[2..];
            }
        }
    }
    out + rest
}

/// Escapes that the engine reads in another way than Python, as both read them: `\U0001F642` and `\/`.
fn with_python_escapes(source: &str, syntax: &SyntaxConfig) -> String {
    let (mut out, mut done) = (String::with_capacity(source.len()), 0);
    // What is no template will be refused when it is compiled.
    for (token, span) in tokenize(source, false, syntax.clone()).map_while(Result::ok) {
        let (start, end) = (span.start_offset as usize, span.end_offset as usize);
        if let (Token::String(_), Some(literal)) = (token, source.get(start..end)) {
            out.push_str(&source[done..start]);
            push_literal(literal, &mut out);
            done = end;
        }
    }
    out + &source[done..]
}

fn push_literal(mut literal: &str, out: &mut String) {
    while let Some(at) = literal.find('\\') {
        out.push_str(&literal[..at]);
        let escaped = &literal[at + 1..];
        let long = || u32::from_str_radix(escaped.strip_prefix('U')?.get(..8)?, 16).ok().and_then(char::from_u32);
        let len = match (escaped.chars().next(), long()) {
            (_, Some(letter)) => {
                out.push(letter);
                9
            }
            (Some('/'), _) => {
                out.push_str("\\\\/");
                1
            }
            (letter, _) => {
                out.push('\\');
                out.extend(letter);
                letter.map_or(0, char::len_utf8)
            }
        };
        literal = &escaped[len..];
    }
    out.push_str(literal);
}

/// What `raise_exception` was called with.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// Refuses to grow beyond [`MAX_OUTPUT_BYTES`].
struct Limited(Vec<u8>);

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT_BYTES {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "the output is too long"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn classify(error: Error) -> ChatError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(cause) = source {
        if let Some(Raised(message)) = cause.downcast_ref() {
            return ChatError::Raised(message.clone());
        }
        if cause.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
            return ChatError::Limit("it computes too much".into());
        }
        if let Some(cause) = cause.downcast_ref::<io::Error>() {
            return ChatError::Limit(cause.to_string());
        }
        source = cause.source();
    }
    ChatError::Render(describe(&error))
}

fn describe(error: &Error) -> String {
    match (error.detail(), error.line()) {
        (Some(detail), Some(line)) => format!("{}: {detail} (line {line})", error.kind()),
        (Some(detail), None) => format!("{}: {detail}", error.kind()),
        (None, _) => error.to_string(),
    }
}
