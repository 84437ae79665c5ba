//! Completion: values for an argument of a prompt or of an address, as the user types them.

use rmcp::ErrorData;
use rmcp::model::{ArgumentInfo, CompletionInfo, Reference};

use crate::call::Call;
use crate::{prompts, resources};

/// Values that begin with the text so far, in the order of the daemon's list.
pub async fn complete(
    call: &Call<'_>,
    reference: &Reference,
    argument: &ArgumentInfo,
) -> Result<CompletionInfo, ErrorData> {
    let known = match reference {
        Reference::Prompt(prompt) => prompts::find(&prompt.name).is_some(),
        Reference::Resource(address) => resources::is_template(&address.uri),
        _ => false,
    };
    if !known {
        return Err(ErrorData::invalid_params(
            "there is no such prompt or resource template",
            None,
        ));
    }
    let all: Vec<String> = match argument.name.as_str() {
        "id" | "sandbox_id" => {
            let live = call.client.sandboxes().await.map_err(resources::refused)?;
            live.into_iter().map(|one| one.id.to_string()).collect()
        }
        "snapshot" => {
            let tags = call.client.snapshots().await.map_err(resources::refused)?;
            tags.into_iter().map(|one| one.tag.to_string()).collect()
        }
        _ => Vec::new(),
    };
    Ok(choose(all, &argument.value))
}

fn choose(mut all: Vec<String>, typed: &str) -> CompletionInfo {
    all.retain(|value| value.starts_with(typed));
    let total = all.len();
    all.truncate(CompletionInfo::MAX_VALUES);
    let mut chosen = CompletionInfo::default();
    chosen.has_more = Some(total > all.len());
    chosen.total = u32::try_from(total).ok();
    chosen.values = all;
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_most_a_hundred_values_are_sent() {
        let all: Vec<String> = (0..250).map(|number| format!("sb-{number}")).collect();
        let chosen = choose(all.clone(), "");
        assert_eq!((chosen.values.len(), chosen.total), (100, Some(250)));
        assert_eq!(chosen.has_more, Some(true));
        assert_eq!(choose(all, "sb-24").values.len(), 11);
    }
}
