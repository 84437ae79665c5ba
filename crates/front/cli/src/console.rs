//! Console output of a guest, made safe for the user's terminal.
//!
//! The guest is hostile: escape sequences can retitle the terminal, move the cursor over earlier lines, write to the
//! clipboard, or make the terminal answer as if the user had typed. [`printable`] lets none through.

use std::iter::Peekable;
use std::str::Chars;

/// Removes control and text-direction characters, and escape sequences with their arguments. Line feeds and tabs stay.
pub fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            '\n' | '\t' => out.push(char),
            '\x1b' => skip_escape(&mut chars),
            '\u{9b}' => skip_csi(&mut chars),
            // Operating system command, device control, start of string, privacy message, application command.
            '\u{9d}' | '\u{90}' | '\u{98}' | '\u{9e}' | '\u{9f}' => skip_string(&mut chars),
            _ if char.is_control() || turns_text(char) => {}
            _ => out.push(char),
        }
    }
    out
}

/// Characters that change the order in which a line is displayed.
fn turns_text(char: char) -> bool {
    matches!(char, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Skips the rest of an escape sequence, after its escape character.
fn skip_escape(chars: &mut Peekable<Chars<'_>>) {
    match chars.peek() {
        Some('[') => {
            chars.next();
            skip_csi(chars);
        }
        Some(']' | 'P' | 'X' | '^' | '_') => {
            chars.next();
            skip_string(chars);
        }
        // Intermediate characters, then one final character.
        Some(' '..='~') => {
            while chars.next_if(|char| (' '..='/').contains(char)).is_some() {}
            chars.next_if(|char| ('0'..='~').contains(char));
        }
        _ => {}
    }
}

/// Skips the parameters and the final character of a control sequence.
fn skip_csi(chars: &mut Peekable<Chars<'_>>) {
    while chars.next_if(|char| (' '..='?').contains(char)).is_some() {}
    chars.next_if(|char| ('@'..='~').contains(char));
}

/// Skips a string up to its terminator. A terminal gives an unfinished one up at a control character, and so does this:
/// a guest must not be able to hide everything that follows.
fn skip_string(chars: &mut Peekable<Chars<'_>>) {
    while chars.next_if(|char| !char.is_control()).is_some() {}
    // The other terminator, `ESC \`, is an escape sequence of its own to the caller.
    chars.next_if(|char| matches!(char, '\x07' | '\u{9c}'));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_stays_as_it_is() {
        let text = "[    0.1] Linux\n\tdeux éà 日本\n";
        assert_eq!(printable(text.as_bytes()), text);
        assert_eq!(printable(b"login:\r\n"), "login:\n");
        assert_eq!(printable(b"\xff\n"), "\u{fffd}\n");
    }

    #[test]
    fn no_escape_sequence_gets_through() {
        for (bytes, shown) in [
            (&b"\x1b[31mred\x1b[0m"[..], "red"),
            (b"\x1b[2J\x1b[1;1Hover", "over"),
            (b"\x1b]0;title\x07after", "after"),
            (b"\x1b]52;c;Zm9v\x1b\\after", "after"),
            (b"\x1bP+q544e\x1b\\after", "after"),
            (b"\x1b(Bx\x1b#8y\x1bcz", "xyz"),
            ("\u{9b}31mred\u{9d}0;t\u{9c}x".as_bytes(), "redx"),
            (b"a\x08\x7f\x00b\x0ec", "abc"),
            ("user\u{202e}txt".as_bytes(), "usertxt"),
            (b"end\x1b", "end"),
            (b"end\x1b[", "end"),
        ] {
            assert_eq!(printable(bytes), shown, "{bytes:?}");
        }
    }

    #[test]
    fn an_unfinished_string_hides_its_own_line_only() {
        assert_eq!(printable(b"\x1b]0;never ends\nnext\n"), "\nnext\n");
    }
}
