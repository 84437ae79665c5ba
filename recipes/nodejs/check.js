// Serves one request to itself and prints 42.
const http = require("http");
const { randomUUID } = require("crypto");

const path = `/${randomUUID()}`;
const server = http.createServer((request, response) => {
  response.end(request.url === path ? JSON.stringify({ answer: 6 * 7 }) : "");
});
server.listen(0, "127.0.0.1", () => {
  http.get({ host: "127.0.0.1", port: server.address().port, path }, async (response) => {
    let text = "";
    for await (const part of response) text += part;
    console.log(JSON.parse(text).answer);
    server.close();
  });
});
