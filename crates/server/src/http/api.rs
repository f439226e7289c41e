//! The APIs of the server.

/// API that a request speaks, by its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`, Anthropic's.
    Messages,
}

impl Api {
    /// Returns the name that this API has for a field of [`Body`].
    pub fn field(self, name: &str) -> &str {
        match (self, name.split('.').next().unwrap_or(name)) {
            (Api::Completion, "messages") => "prompt",
            (Api::Responses, "messages") => "input",
            (Api::Responses, "max_tokens" | "max_completion_tokens") => "max_output_tokens",
            (Api::Responses, "response_format") => "text.format",
            (Api::Responses, "reasoning_effort") => "reasoning.effort",
            (Api::Messages, "max_completion_tokens") => "max_tokens",
            (Api::Messages, "stop") => "stop_sequences",
            (Api::Messages, "response_format") => "output_config.format",
            (Api::Messages, "reasoning_effort") => "output_config.effort",
            _ => name,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Api;

    #[test]
    fn fields_have_the_names_of_their_api() {
        let names = [Api::Chat, Api::Responses, Api::Messages].map(|api| api.field("reasoning_effort"));
        assert_eq!(names, ["reasoning_effort", "reasoning.effort", "output_config.effort"]);
    }
}
