//! The line of a field in the text of a recipe.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The line of a field such as `service[1].ready[0]`, or of its nearest ancestor that the text has. Lines count from 1.
pub fn of(text: &str, field: &str) -> usize {
    let Ok(table) = DeTable::parse(text) else {
        return 1;
    };
    let mut at = 0;
    let mut value: Option<&Spanned<DeValue<'_>>> = None;
    for part in parts(field) {
        let next = match (&part, value.map(Spanned::get_ref)) {
            (Part::Key(key), None) => find(table.get_ref(), key),
            (Part::Key(key), Some(DeValue::Table(table))) => find(table, key),
            (Part::Index(index), Some(DeValue::Array(array))) => {
                array.get(*index).map(|found| (found.span().start, found))
            }
            _ => None,
        };
        let Some((start, found)) = next else { break };
        at = start;
        value = Some(found);
    }
    let before = text.as_bytes().get(..at).unwrap_or_default();
    1 + before.iter().filter(|byte| **byte == b'\n').count()
}

fn find<'a, 't>(table: &'a DeTable<'t>, key: &str) -> Option<(usize, &'a Spanned<DeValue<'t>>)> {
    let (name, value) = table.iter().find(|(name, _)| name.get_ref() == key)?;
    Some((name.span().start, value))
}

enum Part<'a> {
    Key(&'a str),
    Index(usize),
}

fn parts(field: &str) -> impl Iterator<Item = Part<'_>> {
    field
        .split(['.', '[', ']'])
        .filter(|part| !part.is_empty())
        .map(|part| part.parse().map_or(Part::Key(part), Part::Index))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_path() {
        let text = "a = 1\n[b]\nc = 2\n\n[[d]]\ne = 1\n[[d]]\n\ne = [\n 1,\n 2]\n";
        for (field, line) in [
            ("a", 1),
            ("b.c", 3),
            ("d[0].e", 6),
            ("d[1].e", 9),
            ("d[1].e[1]", 11),
            ("b.gone", 2),
            ("gone", 1),
        ] {
            assert_eq!(of(text, field), line, "{field}");
        }
        assert_eq!(of("= broken", "a"), 1);
    }
}
