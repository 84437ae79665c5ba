//! Messages of the envd services, in both codecs of the protocol.
//!
//! Each type is read and written as protobuf (the tags are those of the services) and as its JSON form, which is what the
//! SDKs use: lower camel case names, bytes in base64, 64-bit integers as text, enums by name.

use std::collections::BTreeMap;

use base64::Engine;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A message in both codecs.
pub trait Message: prost::Message + Default {}
impl<T: prost::Message + Default> Message for T {}

/// Bytes as base64. The standard alphabet is written; the one for URLs and missing padding are read as well.
pub mod base64_text {
    use super::*;
    use base64::alphabet;
    use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
    use serde::de::Error;

    const LENIENT: GeneralPurposeConfig =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    const READ: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, LENIENT);

    pub fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&base64::engine::general_purpose::STANDARD.encode(bytes))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(from)?;
        let standard = if text.contains(['-', '_']) {
            text.replace('-', "+").replace('_', "/")
        } else {
            text
        };
        READ.decode(standard).map_err(D::Error::custom)
    }
}

/// A value that JSON may leave out or give as null.
fn or_default<'de, D, T>(from: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::<T>::deserialize(from)?.unwrap_or_default())
}

fn as_text<S: Serializer>(number: &i64, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(number)
}

/// The message without fields.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
pub struct Empty {}

// --- process.Process

/// The size of a terminal.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct Size {
    #[prost(uint32, tag = "1")]
    pub cols: u32,
    #[prost(uint32, tag = "2")]
    pub rows: u32,
}

/// A terminal and its size.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct Pty {
    #[prost(message, optional, tag = "1")]
    pub size: Option<Size>,
}

/// A program and how it is run.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessConfig {
    #[prost(string, tag = "1")]
    pub cmd: String,
    #[prost(string, repeated, tag = "2")]
    #[serde(deserialize_with = "or_default")]
    pub args: Vec<String>,
    #[prost(btree_map = "string, string", tag = "3")]
    #[serde(deserialize_with = "or_default")]
    pub envs: BTreeMap<String, String>,
    #[prost(string, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

/// A running process.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessInfo {
    #[prost(message, optional, tag = "1")]
    pub config: Option<ProcessConfig>,
    #[prost(uint32, tag = "2")]
    pub pid: u32,
    #[prost(string, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    pub processes: Vec<ProcessInfo>,
}

/// Starts a process and follows it.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct StartRequest {
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessConfig>,
    #[prost(message, optional, tag = "2")]
    pub pty: Option<Pty>,
    #[prost(string, optional, tag = "3")]
    pub tag: Option<String>,
    /// Absent means open, as in early versions.
    #[prost(bool, optional, tag = "4")]
    pub stdin: Option<bool>,
}

/// Changes a terminal.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct UpdateRequest {
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessSelector>,
    #[prost(message, optional, tag = "2")]
    pub pty: Option<Pty>,
}

/// Names a process.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessSelector {
    #[prost(oneof = "Selector", tags = "1, 2")]
    #[serde(flatten)]
    pub selector: Option<Selector>,
}

#[derive(Clone, PartialEq, Eq, prost::Oneof, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Selector {
    #[prost(uint32, tag = "1")]
    Pid(u32),
    #[prost(string, tag = "2")]
    Tag(String),
}

/// A step in the life of a process.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessEvent {
    #[prost(oneof = "Event", tags = "1, 2, 3, 4")]
    #[serde(flatten)]
    pub event: Option<Event>,
}

#[derive(Clone, PartialEq, Eq, prost::Oneof, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Event {
    #[prost(message, tag = "1")]
    Start(StartEvent),
    #[prost(message, tag = "2")]
    Data(DataEvent),
    #[prost(message, tag = "3")]
    End(EndEvent),
    #[prost(message, tag = "4")]
    Keepalive(Empty),
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct StartEvent {
    #[prost(uint32, tag = "1")]
    pub pid: u32,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct DataEvent {
    #[prost(oneof = "OutputBytes", tags = "1, 2, 3")]
    #[serde(flatten)]
    pub output: Option<OutputBytes>,
}

#[derive(Clone, PartialEq, Eq, prost::Oneof, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OutputBytes {
    #[prost(bytes = "vec", tag = "1")]
    #[serde(with = "base64_text")]
    Stdout(Vec<u8>),
    #[prost(bytes = "vec", tag = "2")]
    #[serde(with = "base64_text")]
    Stderr(Vec<u8>),
    #[prost(bytes = "vec", tag = "3")]
    #[serde(with = "base64_text")]
    Pty(Vec<u8>),
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EndEvent {
    #[prost(sint32, tag = "1")]
    pub exit_code: i32,
    #[prost(bool, tag = "2")]
    pub exited: bool,
    #[prost(string, tag = "3")]
    pub status: String,
    #[prost(string, optional, tag = "4")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// An event of a process that was started or connected to.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct EventResponse {
    #[prost(message, optional, tag = "1")]
    pub event: Option<ProcessEvent>,
}

impl EventResponse {
    pub fn of(event: Event) -> Self {
        Self {
            event: Some(ProcessEvent { event: Some(event) }),
        }
    }
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct SendInputRequest {
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessSelector>,
    #[prost(message, optional, tag = "2")]
    pub input: Option<ProcessInput>,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessInput {
    #[prost(oneof = "InputBytes", tags = "1, 2")]
    #[serde(flatten)]
    pub input: Option<InputBytes>,
}

#[derive(Clone, PartialEq, Eq, prost::Oneof, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum InputBytes {
    #[prost(bytes = "vec", tag = "1")]
    #[serde(with = "base64_text")]
    Stdin(Vec<u8>),
    #[prost(bytes = "vec", tag = "2")]
    #[serde(with = "base64_text")]
    Pty(Vec<u8>),
}

/// One message of a stream of input.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct StreamInputRequest {
    #[prost(oneof = "StreamInput", tags = "1, 2, 3")]
    #[serde(flatten)]
    pub event: Option<StreamInput>,
}

#[derive(Clone, PartialEq, Eq, prost::Oneof, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StreamInput {
    #[prost(message, tag = "1")]
    Start(InputStart),
    #[prost(message, tag = "2")]
    Data(InputData),
    #[prost(message, tag = "3")]
    Keepalive(Empty),
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct InputStart {
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessSelector>,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct InputData {
    #[prost(message, optional, tag = "2")]
    pub input: Option<ProcessInput>,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct SendSignalRequest {
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessSelector>,
    #[prost(enumeration = "Signal", tag = "2")]
    #[serde(with = "signal_name")]
    pub signal: i32,
}

/// The signals of the protocol, with their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum Signal {
    Unspecified = 0,
    Sigkill = 9,
    Sigterm = 15,
}

macro_rules! enum_name {
    ($module:ident, $kind:ty, [$(($name:literal, $value:path)),* $(,)?]) => {
        /// The JSON form of the enum: a name is written, a name or a number is read.
        mod $module {
            use super::*;

            #[derive(Deserialize)]
            #[serde(untagged)]
            enum Given {
                Name(String),
                Number(i32),
            }

            pub fn serialize<S: Serializer>(value: &i32, to: S) -> Result<S::Ok, S::Error> {
                match <$kind>::try_from(*value) {
                    $(Ok($value) => to.serialize_str($name),)*
                    Err(_) => to.serialize_i32(*value),
                }
            }

            pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<i32, D::Error> {
                Ok(match Given::deserialize(from)? {
                    Given::Number(number) => number,
                    Given::Name(name) => match name.as_str() {
                        $($name => $value as i32,)*
                        _ => 0,
                    },
                })
            }
        }
    };
}

enum_name!(
    signal_name,
    Signal,
    [
        ("SIGNAL_UNSPECIFIED", Signal::Unspecified),
        ("SIGNAL_SIGKILL", Signal::Sigkill),
        ("SIGNAL_SIGTERM", Signal::Sigterm),
    ]
);

/// The request of Connect and CloseStdin.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessRequest {
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessSelector>,
}

// --- filesystem.Filesystem

/// A time since the epoch.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Timestamp {
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

impl Timestamp {
    pub fn of_ms(ms: i64) -> Self {
        Self {
            seconds: ms.div_euclid(1000),
            nanos: (ms.rem_euclid(1000) * 1_000_000) as i32,
        }
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let ms = self
            .seconds
            .saturating_mul(1000)
            .saturating_add(i64::from(self.nanos / 1_000_000));
        to.serialize_str(&crate::e2b::text::time_ms(u64::try_from(ms).unwrap_or(0)))
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let seconds = crate::e2b::text::parse_time(&text);
        let seconds = seconds.ok_or_else(|| serde::de::Error::custom("not a time"))?;
        Ok(Self {
            seconds: i64::try_from(seconds).unwrap_or(i64::MAX),
            nanos: 0,
        })
    }
}

/// The kind of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum FileType {
    Unspecified = 0,
    File = 1,
    Directory = 2,
    Symlink = 3,
}

enum_name!(
    file_type_name,
    FileType,
    [
        ("FILE_TYPE_UNSPECIFIED", FileType::Unspecified),
        ("FILE_TYPE_FILE", FileType::File),
        ("FILE_TYPE_DIRECTORY", FileType::Directory),
        ("FILE_TYPE_SYMLINK", FileType::Symlink),
    ]
);

/// A file or directory.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EntryInfo {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(enumeration = "FileType", tag = "2")]
    #[serde(with = "file_type_name")]
    pub r#type: i32,
    #[prost(string, tag = "3")]
    pub path: String,
    #[prost(int64, tag = "4")]
    #[serde(serialize_with = "as_text", skip_deserializing)]
    pub size: i64,
    #[prost(uint32, tag = "5")]
    pub mode: u32,
    #[prost(string, tag = "6")]
    pub permissions: String,
    #[prost(string, tag = "7")]
    pub owner: String,
    #[prost(string, tag = "8")]
    pub group: String,
    #[prost(message, optional, tag = "9")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modified_time: Option<Timestamp>,
    #[prost(string, optional, tag = "10")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    #[prost(btree_map = "string, string", tag = "11")]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    #[prost(bool, tag = "12")]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_symlink: bool,
}

/// The request of Stat, MakeDir and Remove.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct PathRequest {
    #[prost(string, tag = "1")]
    pub path: String,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct MoveRequest {
    #[prost(string, tag = "1")]
    pub source: String,
    #[prost(string, tag = "2")]
    pub destination: String,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ListDirRequest {
    #[prost(string, tag = "1")]
    pub path: String,
    #[prost(uint32, tag = "2")]
    pub depth: u32,
}

/// The answer of Stat, MakeDir and Move.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct EntryResponse {
    #[prost(message, optional, tag = "1")]
    pub entry: Option<EntryInfo>,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ListDirResponse {
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<EntryInfo>,
}

/// The request of WatchDir and CreateWatcher.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WatchRequest {
    #[prost(string, tag = "1")]
    pub path: String,
    #[prost(bool, tag = "2")]
    pub recursive: bool,
    #[prost(bool, tag = "3")]
    #[serde(alias = "include_entry")]
    pub include_entry: bool,
    #[prost(bool, tag = "4")]
    #[serde(alias = "allow_network_mounts")]
    pub allow_network_mounts: bool,
}

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum EventType {
    Unspecified = 0,
    Create = 1,
    Write = 2,
    Remove = 3,
    Rename = 4,
    Chmod = 5,
}

enum_name!(
    event_type_name,
    EventType,
    [
        ("EVENT_TYPE_UNSPECIFIED", EventType::Unspecified),
        ("EVENT_TYPE_CREATE", EventType::Create),
        ("EVENT_TYPE_WRITE", EventType::Write),
        ("EVENT_TYPE_REMOVE", EventType::Remove),
        ("EVENT_TYPE_RENAME", EventType::Rename),
        ("EVENT_TYPE_CHMOD", EventType::Chmod),
    ]
);

/// A change below a watched directory.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct FilesystemEvent {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(enumeration = "EventType", tag = "2")]
    #[serde(with = "event_type_name")]
    pub r#type: i32,
    #[prost(message, optional, tag = "3")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct WatchDirResponse {
    #[prost(oneof = "WatchEvent", tags = "1, 2, 3")]
    #[serde(flatten)]
    pub event: Option<WatchEvent>,
}

impl WatchDirResponse {
    pub fn of(event: WatchEvent) -> Self {
        Self { event: Some(event) }
    }
}

#[derive(Clone, PartialEq, Eq, prost::Oneof, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[expect(
    clippy::large_enum_variant,
    reason = "the form that prost derives from"
)]
pub enum WatchEvent {
    #[prost(message, tag = "1")]
    Start(Empty),
    #[prost(message, tag = "2")]
    Filesystem(FilesystemEvent),
    #[prost(message, tag = "3")]
    Keepalive(Empty),
}

/// A watcher that is polled, by its ID.
#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Watcher {
    #[prost(string, tag = "1")]
    #[serde(alias = "watcher_id")]
    pub watcher_id: String,
}

#[derive(Clone, PartialEq, Eq, prost::Message, Serialize, Deserialize)]
#[serde(default)]
pub struct WatcherEvents {
    #[prost(message, repeated, tag = "1")]
    pub events: Vec<FilesystemEvent>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message as _;

    fn json<T: Serialize>(value: &T) -> String {
        serde_json::to_string(value).unwrap()
    }

    #[test]
    fn events_have_the_json_form_of_the_protocol() {
        let start = EventResponse::of(Event::Start(StartEvent { pid: 7 }));
        assert_eq!(json(&start), r#"{"event":{"start":{"pid":7}}}"#);
        let output = Some(OutputBytes::Stdout(b"hi\n".to_vec()));
        let data = EventResponse::of(Event::Data(DataEvent { output }));
        assert_eq!(json(&data), r#"{"event":{"data":{"stdout":"aGkK"}}}"#);
        let alive = EventResponse::of(Event::Keepalive(Empty {}));
        assert_eq!(json(&alive), r#"{"event":{"keepalive":{}}}"#);
        let watch = WatchDirResponse::of(WatchEvent::Start(Empty {}));
        assert_eq!(json(&watch), r#"{"start":{}}"#);
        let entry = EntryInfo {
            r#type: FileType::File as i32,
            size: 8,
            ..EntryInfo::default()
        };
        let text = json(&entry);
        assert!(text.contains(r#""type":"FILE_TYPE_FILE""#), "{text}");
        assert!(text.contains(r#""size":"8""#), "{text}");
    }

    #[test]
    fn requests_are_read_as_the_sdks_send_them() {
        let start: StartRequest = serde_json::from_str(
            r#"{"process":{"cmd":"/bin/bash","args":["-l","-c","x"],"envs":{"A":"1"}},"stdin":false,"new":1}"#,
        )
        .unwrap();
        assert_eq!(start.stdin, Some(false));
        assert_eq!(start.process.unwrap().args, ["-l", "-c", "x"]);
        let input: SendInputRequest =
            serde_json::from_str(r#"{"process":{"pid":3},"input":{"stdin":"_-8"}}"#).unwrap();
        assert_eq!(input.process.unwrap().selector, Some(Selector::Pid(3)));
        let bytes = InputBytes::Stdin(vec![0xff, 0xef]);
        assert_eq!(input.input.unwrap().input, Some(bytes));
        for signal in [r#""SIGNAL_SIGTERM""#, "15"] {
            let text = format!(r#"{{"process":{{"tag":"t"}},"signal":{signal}}}"#);
            let request: SendSignalRequest = serde_json::from_str(&text).unwrap();
            assert_eq!(request.signal, 15);
        }
        let keepalive: StreamInputRequest = serde_json::from_str(r#"{"keepalive":{}}"#).unwrap();
        assert_eq!(keepalive.event, Some(StreamInput::Keepalive(Empty {})));
    }

    #[test]
    fn protobuf_has_the_tags_of_the_protocol() {
        let event = EventResponse::of(Event::End(EndEvent {
            exit_code: -1,
            ..EndEvent::default()
        }));
        // event { end { exit_code: zigzag(-1) } }
        assert_eq!(event.encode_to_vec(), [0x0a, 4, 0x1a, 2, 0x08, 1]);
        let data = InputData {
            input: Some(ProcessInput {
                input: Some(InputBytes::Pty(vec![b'x'])),
            }),
        };
        assert_eq!(data.encode_to_vec(), [0x12, 3, 0x12, 1, b'x']);
        let back = InputData::decode(data.encode_to_vec().as_slice()).unwrap();
        assert_eq!(back, data);
    }
}
